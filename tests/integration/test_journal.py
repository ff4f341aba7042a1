"""The journal against the real store, and against a model of it that was written on its own."""

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from atoll.coordinator.journal import scripts
from atoll.coordinator.journal.journal import (
    Checkpoint,
    Journal,
    JournalError,
    Lineage,
    OpenSession,
    RestoredGroup,
)
from atoll.coordinator.journal.ledger import LEDGER, Ledger
from atoll.runtime.errors import StaleFenceError, UserError
from atoll.runtime.store import EmbeddedServer, Script, Store, run_embedded_server
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import (
    FinishReason,
    GroupId,
    Node,
    Origin,
    SampleId,
    Trajectory,
    TrajectoryStatus,
    Turn,
    Version,
    VersionSpan,
)

CURSOR = '{"drawn": [4]}'


def sample_id(prompt: int, index: int = 0) -> SampleId:
    return SampleId(GroupId("toy", 0, prompt), index)


def sample(id: SampleId, version: Version, attempt: int = 0) -> Trajectory:
    """Its text tells samples and attempts apart."""
    node = Node(
        parent=-1,
        token_ids=np.array([id.group.prompt, id.index, 2], np.int32),
        loss_mask=np.array([True, True, True]),
        logprobs=np.array([-0.5, -0.25, -attempt], np.float32),
        spans=(VersionSpan(version, 0, 3),),
    )
    turn = Turn(0, FinishReason.STOP, f"{id}:{attempt}", Origin("rollout-0", "1"), 1.0, 2.0)
    return Trajectory(id, attempt, (node,), (turn,), TrajectoryStatus.COMPLETED)


async def opened(store: Store, folder: Path) -> tuple[Journal, str]:
    journal = Journal(store, "toy", Ledger(folder / LEDGER))
    return journal, (await journal.restore(None)).lineage


async def finish(journal: Journal, samples: Sequence[Trajectory]) -> list[Trajectory]:
    return await journal.finish(samples, encode_payload(samples))


async def saved(journal: Journal, step: int, version: Version, folder: Path) -> Checkpoint:
    path = folder / f"journal-{step}.bin"
    await (await journal.snapshot(step)).write(path)
    return Checkpoint(step, version, path)


async def restore(journal: Journal, checkpoint: Checkpoint) -> list[RestoredGroup]:
    """All groups that were in flight, as if they were all admitted at once."""
    return await journal.load((await journal.restore(checkpoint)).groups)


def texts(groups: Sequence[RestoredGroup]) -> list[tuple[str | None, ...]]:
    return [tuple(s.text if s else None for s in group.samples) for group in groups]


async def test_the_first_finished_attempt_wins_and_a_second_is_refused_and_counted(
    store: Store, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    id, now = sample_id(1), Version(lineage, 0)
    await journal.issue([id], CURSOR)
    await journal.retry([id], "replica lost")
    first, second = sample(id, now, 0), sample(id, now, 1)
    assert await finish(journal, [first]) == [first]
    assert await finish(journal, [second]) == []
    assert (await journal.counts())["refused"] == 1
    restored = await restore(journal, await saved(journal, 0, now, tmp_path))
    assert texts(restored) == [("toy/0/1/0:0",)]


async def test_a_finished_sample_that_was_replaced_may_not_return(store: Store, tmp_path: Path) -> None:
    journal, lineage = await opened(store, tmp_path)
    id, now = sample_id(1), Version(lineage, 0)
    await journal.issue([id], CURSOR)
    await finish(journal, [sample(id, now, 0)])
    await journal.retry([id], "stale")
    assert await finish(journal, [sample(id, now, 0)]) == []
    fresh = sample(id, now, 1)
    assert await finish(journal, [fresh]) == [fresh]
    counts = await journal.counts()
    assert (counts["retried: stale"], counts["refused"]) == (1, 1)


async def test_a_sample_is_consumed_once_and_all_or_nothing(store: Store, tmp_path: Path) -> None:
    journal, lineage = await opened(store, tmp_path)
    a, b, c = (sample_id(prompt) for prompt in range(3))
    await journal.issue([a, b, c], CURSOR)
    await finish(journal, [sample(id, Version(lineage, 0)) for id in (a, b)])
    with pytest.raises(JournalError, match="toy/0/2/0 is not finished: still issued; nothing was consumed"):
        await journal.consume(1, [a, c])
    await journal.consume(1, [a])
    with pytest.raises(JournalError, match="toy/0/0/0 was consumed before, by step 1"):
        await journal.consume(2, [b, a])
    await journal.consume(2, [b])
    await journal.commit(2)
    with pytest.raises(JournalError, match="never issued, dropped, or covered by a checkpoint"):
        await journal.consume(3, [a])


async def test_a_consumed_sample_can_be_neither_retried_nor_dropped(store: Store, tmp_path: Path) -> None:
    journal, lineage = await opened(store, tmp_path)
    id = sample_id(1)
    await journal.issue([id], CURSOR)
    await finish(journal, [sample(id, Version(lineage, 0))])
    await journal.consume(1, [id])
    await journal.retry([id], "late")
    await journal.drop([id], "late")
    assert await finish(journal, [sample(id, Version(lineage, 0), 1)]) == []
    with pytest.raises(JournalError, match="by step 1"):
        await journal.consume(2, [id])


async def test_a_sample_comes_back_byte_for_byte(store: Store, tmp_path: Path) -> None:
    journal, lineage = await opened(store, tmp_path)
    now = Version(lineage, 0)
    original = sample(sample_id(7, 0), now)
    await journal.issue([original.id], CURSOR)
    await finish(journal, [original])
    ((back,),) = [g.samples for g in await restore(journal, Checkpoint(0, now, None))]
    assert back is not None
    np.testing.assert_array_equal(back.nodes[0].token_ids, [7, 0, 2])
    np.testing.assert_array_equal(back.nodes[0].logprobs, np.float32([-0.5, -0.25, 0.0]))
    np.testing.assert_array_equal(back.nodes[0].loss_mask, [True, True, True])
    assert back.nodes[0].spans == (VersionSpan(now, 0, 3),)
    assert (back.id, back.attempt, back.text) == (original.id, 0, "toy/0/7/0:0")
    assert (back.finish_reason, back.turns) == (
        FinishReason.STOP,
        original.turns,
    )


async def test_commit_frees_payloads_with_the_last_sample_that_needs_them(
    store: Store, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    ids = [sample_id(prompt) for prompt in range(3)]
    await journal.issue(ids, CURSOR)
    await finish(journal, [sample(id, Version(lineage, 0)) for id in ids])  # one payload for all three
    await journal.consume(1, ids[:1])
    await journal.consume(2, ids[1:2])
    await journal.commit(2)
    assert await store.read("HLEN", "journal/payloads") == 1
    await journal.drop(ids[2:], "filtered")
    for table in ("payloads", "refs", "finished", "issued"):
        assert await store.read("HLEN", f"journal/{table}") == 0
    assert await store.read("ZCARD", "journal/consumed") == 0


async def test_every_drop_and_retry_is_a_record_with_its_reason_and_counted_by_its_kind(
    store: Store, tmp_path: Path
) -> None:
    journal, _ = await opened(store, tmp_path)
    await journal.issue([sample_id(1, 0), sample_id(1, 1)], CURSOR)
    await journal.retry([sample_id(1, 1)], "lost with rollout-0: 10.0.0.7:41: reset")
    await journal.drop([sample_id(1, 0), sample_id(1, 1)], "reward gsm8k: NaN")
    events = await store.read("XRANGE", "journal/events", "-", "+")
    assert [fields for _, fields in events] == [
        [b"event", b"retried: lost with rollout-0: 10.0.0.7:41: reset", b"samples", b"0/1/1"],
        [b"event", b"dropped: reward gsm8k: NaN", b"samples", b"0/1/0 0/1/1"],
    ]
    counts = await journal.counts()
    assert {name: n for name, n in counts.items() if ": " in name} == {
        "retried: lost with rollout-0": 1,
        "dropped: reward gsm8k": 2,
    }


async def test_the_batch_that_a_trainer_refused_is_dropped(store: Store, tmp_path: Path) -> None:
    journal, lineage = await opened(store, tmp_path)
    a, b = sample_id(0), sample_id(1)
    await journal.issue([a, b], CURSOR)
    await finish(journal, [sample(id, Version(lineage, 0)) for id in (a, b)])
    await journal.consume(1, [a])
    await journal.consume(2, [b])
    await journal.drop([a, b], "refused by the trainer: NaN", step=2)
    restored = await restore(journal, Checkpoint(0, Version(lineage, 0), None))
    assert texts(restored) == [("toy/0/0/0:0",)]


async def test_a_snapshot_leaves_out_what_was_trained_on_and_what_was_released_since(
    store: Store, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    ids = [sample_id(prompt) for prompt in range(3)]
    await journal.issue(ids, CURSOR)
    for id in ids:
        await finish(journal, [sample(id, Version(lineage, 0))])
    await journal.consume(1, ids[:1])
    snapshot = await journal.snapshot(1)
    await journal.retry(ids[1:2], "stale")
    await snapshot.write(tmp_path / "journal.bin")
    content = (tmp_path / "journal.bin").read_bytes()
    assert [f"toy/0/{prompt}/0:0".encode() in content for prompt in range(3)] == [False, False, True]
    await store.write(Script("redis.call('DEL', unpack(KEYS))"), scripts.TABLES)
    opened_again = await journal.restore(Checkpoint(1, Version(lineage, 0), tmp_path / "journal.bin"))
    restored = await journal.load(opened_again.groups)
    assert texts(restored) == [(None,), ("toy/0/2/0:0",)]
    assert restored[0].attempts == (2,)  # the attempt that was to replace the stale one, and one more
    assert opened_again.cursor == CURSOR


async def test_payloads_are_counted_until_a_checkpoint_frees_them(store: Store, tmp_path: Path) -> None:
    journal = Journal(store, "toy", Ledger(tmp_path / LEDGER), max_bytes=300)
    lineage = (await journal.restore(None)).lineage
    ids = [sample_id(prompt) for prompt in range(4)]
    await journal.issue(ids, CURSOR)
    payloads = [sample(id, Version(lineage, 0)) for id in ids]
    sizes = [len(encode_payload([each])) for each in payloads]
    for number, each in enumerate(payloads, 1):
        await finish(journal, [each])
        assert journal.num_bytes == sum(sizes[:number])
    assert journal.full
    await journal.consume(1, ids[:3])
    await journal.commit(1)
    assert journal.num_bytes == sizes[3]
    assert not journal.full
    await journal.restore(await saved(journal, 1, Version(lineage, 1), tmp_path))
    assert journal.num_bytes == sizes[3]


class CrashError(Exception): ...


def crashing(journal: Journal, script: Script, after: int) -> None:
    """The process dies when it has run `script` so many times."""
    write, left = journal._bulk_write, after

    async def once(chosen: Script, *args: str | bytes | int) -> object:
        nonlocal left
        if chosen is script:
            if left == 0:
                raise CrashError
            left -= 1
        return await write(chosen, *args)

    journal._bulk_write = once  # type: ignore[method-assign]


async def many_groups(journal: Journal, lineage: str, tmp_path: Path) -> Checkpoint:
    """2,500 groups, more than two parts: a checkpoint has all of them, a later step consumed each."""
    ids = [sample_id(prompt) for prompt in range(2500)]
    await journal.issue(ids, CURSOR)
    await finish(journal, [sample(id, Version(lineage, 0)) for id in ids])
    checkpoint = await saved(journal, 0, Version(lineage, 0), tmp_path)
    await journal.consume(1, ids)
    return checkpoint


@pytest.mark.parametrize(
    ("script", "after", "wiped"),
    [
        (scripts.UNCONSUME, 1, False),
        (scripts.UNCONSUME, 3, False),
        (scripts.FILL_PAYLOADS, 0, True),
        (scripts.FILL_FINISHED, 1, True),
        (scripts.SEAL, 0, True),
        (scripts.BRANCH, 0, True),
    ],
)
async def test_a_crash_in_the_midst_of_a_restart_loses_nothing(
    store: Store, tmp_path: Path, script: Script, after: int, wiped: bool
) -> None:
    journal, lineage = await opened(store, tmp_path)
    checkpoint = await many_groups(journal, lineage, tmp_path)
    if wiped:
        await store.write(Script("redis.call('DEL', unpack(KEYS))"), scripts.TABLES)
    crashing(journal, script, after)
    with pytest.raises(CrashError):
        await journal.restore(checkpoint)
    again = Journal(store, "toy", Ledger(tmp_path / LEDGER))
    restored = await restore(again, checkpoint)
    assert texts(restored) == [(f"toy/0/{prompt}/0:0",) for prompt in range(2500)]
    assert await store.read("HLEN", "journal/refs") == await store.read("HLEN", "journal/payloads") == 1


async def test_a_crash_in_the_midst_of_a_commit_makes_an_earlier_checkpoint_bring_its_own_journal(
    store: Store, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    checkpoint = await many_groups(journal, lineage, tmp_path)
    crashing(journal, scripts.COMMIT, 1)
    with pytest.raises(CrashError):
        await journal.commit(1)
    assert await store.read("HLEN", "journal/trained") == 1500
    restored = await restore(Journal(store, "toy", Ledger(tmp_path / LEDGER)), checkpoint)
    assert texts(restored) == [(f"toy/0/{prompt}/0:0",) for prompt in range(2500)]


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (
            b"\n\x04\n\x020/",
            "not a journal that this version of Atoll reads: continue the run with the version",
        ),
        (b"atoll journal 2\n\x09\0\0\0\0\0\0\0\n", "is damaged: it ends within a record"),
    ],
)
async def test_a_journal_of_another_version_and_a_damaged_one_are_refused(
    store: Store, tmp_path: Path, content: bytes, refusal: str
) -> None:
    (tmp_path / "journal.bin").write_bytes(content)
    journal = Journal(store, "toy", Ledger(tmp_path / LEDGER))
    with pytest.raises(UserError, match=refusal):
        await journal.restore(Checkpoint(1, Version("a3f0", 1), tmp_path / "journal.bin"))


async def test_a_run_without_a_checkpoint_says_so_if_the_store_is_lost(store: Store, tmp_path: Path) -> None:
    journal = Journal(store, "toy", Ledger(tmp_path / LEDGER))
    with pytest.raises(UserError, match="lacks the journal of the run toy: it is lost, or"):
        await journal.restore(Checkpoint(3, Version("a3f0", 0), None))


async def test_a_second_coordinator_shuts_the_first_one_out(
    store_server: EmbeddedServer, store: Store, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    await journal.issue([sample_id(1)], CURSOR)
    successor = Store(store_server.url, request.node.name)
    await successor.take_epoch()
    with pytest.raises(StaleFenceError):
        await finish(journal, [sample(sample_id(1), Version(lineage, 0))])
    assert await successor.read("HLEN", "journal/finished") == 0
    await successor.close()


async def test_samples_of_a_branch_that_was_left_are_generated_again(store: Store, tmp_path: Path) -> None:
    """Lineage A publishes 0, 1, 2; a checkpoint at 1 is restored: samples of A:2 are of another model."""
    journal, a = await opened(store, tmp_path)
    ids = [sample_id(prompt) for prompt in range(4)]
    await journal.issue(ids, CURSOR)
    await finish(journal, [sample(ids[0], Version(a, 1)), sample(ids[1], Version(a, 2))])
    opened_b = await journal.restore(Checkpoint(1, Version(a, 1), None))
    restored, b = await journal.load(opened_b.groups), opened_b.lineage
    assert texts(restored) == [("toy/0/0/0:0",), (None,), (None,), (None,)]
    assert [group.attempts for group in restored] == [(0,), (1,), (1,), (1,)]
    counts = await journal.counts()
    assert (counts["retried: lineage"], counts["retried: restart"]) == (1, 2)
    # the new lineage B goes on from A:1; a checkpoint at B:3 keeps what A made up to 1 and B up to 3
    await finish(journal, [sample(ids[2], Version(b, 3), 1), sample(ids[3], Version(b, 4), 1)])
    restored = await restore(journal, Checkpoint(1, Version(b, 3), None))
    assert texts(restored) == [("toy/0/0/0:0",), (None,), ("toy/0/2/0:1",), (None,)]


async def test_an_open_session_outlives_a_restart_until_its_sample_is_done(
    store: Store, tmp_path: Path
) -> None:
    journal, lineage = await opened(store, tmp_path)
    a, b, c, d = ids = [sample_id(prompt) for prompt in range(4)]
    await journal.issue(ids, CURSOR)
    await journal.retry([b], "replica lost")
    before, now, later = (Version(lineage, number) for number in range(3))
    sessions = [OpenSession(a, 0, before), OpenSession(b, 0, before), OpenSession(b, 1, before)]
    assert await journal.open(sessions) == [sessions[0], sessions[2]]  # the first attempt at b is lost
    assert await journal.open([OpenSession(a, 0, now), OpenSession(c, 0, later)])
    checkpoint = await saved(journal, 0, now, tmp_path)
    restored = await restore(journal, checkpoint)
    # c's last turn was made by a version that this branch has not; d had no session
    assert [group.attempts for group in restored] == [(0,), (1,), (1,), (1,)]
    assert await finish(journal, [done := sample(a, now)]) == [done]
    await journal.drop([b], "no replica takes it")
    assert await journal.open([OpenSession(a, 0, now), OpenSession(b, 1, now)]) == []
    assert await store.read("HLEN", "journal/open") == 0
    await journal.open([OpenSession(d, 1, now)])
    await store.write(Script("redis.call('DEL', unpack(KEYS))"), scripts.TABLES)
    restored = await restore(journal, checkpoint)  # in which no session is open
    assert [group.attempts for group in restored] == [(1,), (2,), (1,), (1,)]


async def test_an_older_checkpoint_than_the_last_brings_its_own_journal(store: Store, tmp_path: Path) -> None:
    journal, a = await opened(store, tmp_path)
    x, y = sample_id(0), sample_id(1)
    await journal.issue([x, y], CURSOR)
    await finish(journal, [sample(x, Version(a, 0))])
    old = await saved(journal, 0, Version(a, 0), tmp_path)
    await journal.consume(1, [x])
    await journal.commit(1)  # the store has forgotten x
    restored = await restore(journal, old)
    assert texts(restored) == [("toy/0/0/0:0",), (None,)]
    assert [group.id.prompt for group in restored] == [0, 1]


async def test_a_checkpoint_of_another_branch_brings_its_own_journal(store: Store, tmp_path: Path) -> None:
    """Lineage A is saved at steps 1 and 2; after a restore of 1 the store belongs to branch B."""
    journal, a = await opened(store, tmp_path)
    await journal.issue([sample_id(0)], CURSOR)
    early = await saved(journal, 1, Version(a, 1), tmp_path)
    await journal.issue([sample_id(1)], CURSOR)
    late = await saved(journal, 2, Version(a, 2), tmp_path)
    await journal.restore(early)
    await journal.drop([sample_id(0)], "test")
    await journal.issue([sample_id(2)], CURSOR)
    restored = await restore(journal, late)
    assert [group.id.prompt for group in restored] == [0, 1]


async def test_a_crash_between_checkpoint_and_commit_trains_on_nothing_twice(
    store: Store, tmp_path: Path
) -> None:
    journal, a = await opened(store, tmp_path)
    ids = [sample_id(0), sample_id(1)]
    await journal.issue(ids, CURSOR)
    await finish(journal, [sample(id, Version(a, 0)) for id in ids])
    await journal.consume(1, ids[:1])
    checkpoint = await saved(journal, 1, Version(a, 1), tmp_path)
    await journal.consume(2, ids[1:])  # after the checkpoint, so it comes back
    restored = await restore(journal, checkpoint)
    assert texts(restored) == [("toy/0/1/0:0",)]


def test_a_lineage_holds_its_ancestors_up_to_the_fork() -> None:
    """A forks at 5 to B, B at 8 to C, and B at 3, where it was still A's, to D."""
    b = Lineage("A", {}).branch("B", 5)
    c, d = b.branch("C", 8), b.branch("D", 3)
    assert [
        d.contains(Version(*v)) for v in (("A", 3), ("A", 4), ("B", 3), ("B", 4), ("C", 1), ("D", 9))
    ] == [*(True, False, True, False, False, True)]
    assert [
        c.contains(Version(*v)) for v in (("A", 5), ("A", 6), ("B", 8), ("B", 9), ("D", 1), ("C", 9))
    ] == [*(True, False, True, False, False, True)]


async def test_no_finished_sample_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        journal, lineage = await opened(store, tmp_path)
        ids = [sample_id(prompt, index) for prompt in range(50) for index in range(4)]
        await journal.issue(ids, CURSOR)
        for start in range(0, len(ids), 10):
            await finish(journal, [sample(id, Version(lineage, 0)) for id in ids[start : start + 10]])
        await journal.consume(1, ids[:100])
        server.process.kill()
        server.process.wait()
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        journal = Journal(store, "toy", Ledger(tmp_path / LEDGER))
        restored = await restore(journal, Checkpoint(0, Version(lineage, 0), None))
        assert texts(restored) == [
            tuple(f"toy/0/{prompt}/{index}:0" for index in range(4)) for prompt in range(50)
        ]
        await store.close()


@dataclasses.dataclass
class Entry:
    """What the model knows of one sample."""

    state: str = "issued"  # or "finished", "consumed"
    first: int = 0
    last: int = 0
    won: int = -1
    version: tuple[str, int] = ("", 0)
    session: tuple[str, int] | None = None  # version of its last turn
    step: int = 0

    def retry(self) -> None:
        self.last += 1
        self.session = None
        if self.state == "finished":
            self.state, self.first = "issued", self.last


@dataclasses.dataclass
class World:
    """The run as it should be; a checkpoint keeps a copy."""

    entries: dict[SampleId, Entry]  # in the order of their issue
    path: list[tuple[str, int]]  # every version that led to the current one, and that one
    trained: set[SampleId]  # by the steps that led to the current one
    step: int = 0
    cursor: int = 0  # number of issues

    def copy(self) -> "World":
        entries = {id: dataclasses.replace(entry) for id, entry in self.entries.items()}
        return World(entries, list(self.path), set(self.trained), self.step, self.cursor)

    def without_consumed(self, step: int) -> dict[SampleId, Entry]:
        return {id: e for id, e in self.entries.items() if not (e.state == "consumed" and e.step <= step)}


SIZE = 2  # samples of a group
prompts = st.integers(0, 3)
attempts = st.tuples(st.integers(0, SIZE - 1), st.integers(0, 3))


def group_of(prompt: int) -> list[SampleId]:
    return [sample_id(prompt, index) for index in range(SIZE)]


class JournalMachine(RuleBasedStateMachine):
    """Random runs with crashes: nothing finished is lost, nothing is trained on twice."""

    server: EmbeddedServer
    scratch: Path
    number = 0

    def __init__(self) -> None:
        super().__init__()
        JournalMachine.number += 1
        self.runner = asyncio.Runner()
        self.store = Store(self.server.url, f"machine-{JournalMachine.number}")
        self.runner.run(self.store.take_epoch())
        self.folder = Path(tempfile.mkdtemp(dir=self.scratch))
        self.journal = Journal(self.store, "toy", Ledger(self.folder / LEDGER))
        lineage = self.runner.run(self.journal.restore(None)).lineage
        self.world = World({}, [(lineage, 0)], set())
        self.committed = 0
        self.checkpoints: list[tuple[Checkpoint, World]] = []
        self.checkpoint(commits=True)

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    @rule(prompt=prompts)
    def issue(self, prompt: int) -> None:
        if set(group_of(prompt)) & self.world.trained:
            return  # the data cursor is past it
        self.world.cursor += 1
        self.runner.run(self.journal.issue(group_of(prompt), str(self.world.cursor)))
        for id in group_of(prompt):
            self.world.entries.setdefault(id, Entry())

    @rule(prompt=prompts, attempts=st.lists(attempts, min_size=1, unique=True))
    def finish(self, prompt: int, attempts: list[tuple[int, int]]) -> None:
        version = self.world.path[-1]
        samples = [sample(sample_id(prompt, i), Version(*version), attempt) for i, attempt in attempts]
        expected = []
        for each in samples:
            entry = self.world.entries.get(each.id)
            if entry and entry.state == "issued" and each.attempt >= entry.first:
                expected.append(each)
                entry.state, entry.won, entry.version = "finished", each.attempt, version
        assert self.runner.run(finish(self.journal, samples)) == expected

    @rule()
    def finish_all(self) -> None:
        version = self.world.path[-1]
        running = {id: entry for id, entry in self.world.entries.items() if entry.state == "issued"}
        samples = [sample(id, Version(*version), entry.last) for id, entry in running.items()]
        for entry in running.values():
            entry.state, entry.won, entry.version = "finished", entry.last, version
        assert self.runner.run(finish(self.journal, samples)) == samples

    @rule(prompt=prompts, attempt=attempts)
    def open(self, prompt: int, attempt: tuple[int, int]) -> None:
        (index, number), version = attempt, self.world.path[-1]
        session = OpenSession(sample_id(prompt, index), number, Version(*version))
        entry = self.world.entries.get(session.id)
        is_last = entry is not None and entry.state == "issued" and entry.last == number
        assert self.runner.run(self.journal.open([session])) == [session] * is_last
        if entry and is_last:
            entry.session = version

    @rule(prompt=prompts, index=st.integers(0, SIZE - 1))
    def retry(self, prompt: int, index: int) -> None:
        self.runner.run(self.journal.retry([sample_id(prompt, index)], "test"))
        entry = self.world.entries.get(sample_id(prompt, index))
        if entry and entry.state != "consumed":
            entry.retry()

    @rule(prompt=prompts)
    def drop(self, prompt: int) -> None:
        self.runner.run(self.journal.drop(group_of(prompt), "test"))
        for id in group_of(prompt):
            if id in self.world.entries and self.world.entries[id].state != "consumed":
                del self.world.entries[id]

    @rule(chosen=st.sets(prompts, min_size=1))
    def train(self, chosen: set[int]) -> None:
        """On those that are finished; where none is, the journal must refuse them."""
        entries = self.world.entries
        ready = [p for p in chosen if all(entries.get(id, Entry()).state == "finished" for id in group_of(p))]
        ids = [id for prompt in ready or chosen for id in group_of(prompt)]
        if not ready:
            with pytest.raises(JournalError):
                self.runner.run(self.journal.consume(self.world.step + 1, ids))
            return
        self.world.step += 1
        self.runner.run(self.journal.consume(self.world.step, ids))
        assert not self.world.trained & set(ids), "trained on twice"
        self.world.trained |= set(ids)
        for id in ids:
            entries[id].state, entries[id].step = "consumed", self.world.step
        lineage, number = self.world.path[-1]
        self.world.path.append((lineage, number + 1))

    @rule(commits=st.booleans())
    def checkpoint(self, commits: bool) -> None:
        """Without the commit: a crash comes after the checkpoint was written, before the store knows."""
        version = Version(*self.world.path[-1])
        folder = self.folder / str(len(self.checkpoints))
        folder.mkdir(exist_ok=True)
        checkpoint = self.runner.run(saved(self.journal, self.world.step, version, folder))
        self.checkpoints.append((checkpoint, self.world.copy()))
        if commits:
            self.runner.run(self.journal.commit(self.world.step))
            self.committed = self.world.step
            self.world.entries = self.world.without_consumed(self.world.step)

    @rule(data=st.data(), wiped=st.booleans(), latest=st.booleans())
    def restore(self, data: st.DataObject, wiped: bool, latest: bool) -> None:
        """A crash, with or without the loss of the store; the run goes on from any checkpoint."""
        last = len(self.checkpoints) - 1
        checkpoint, then = self.checkpoints[last if latest else data.draw(st.integers(0, last))]
        if wiped:
            self.runner.run(self.store.write(Script("redis.call('DEL', unpack(KEYS))"), scripts.TABLES))
        version = (checkpoint.version.lineage, checkpoint.version.number)
        continues = not wiped and self.committed <= checkpoint.step and version in self.world.path
        restored = self.runner.run(self.journal.restore(checkpoint))

        then = then.copy()
        path = [*then.path, (restored.lineage, checkpoint.version.number)]
        entries = (self.world if continues else then).without_consumed(checkpoint.step)
        for entry in entries.values():
            if entry.state == "consumed":
                entry.state = "finished"
            goes_on = continues and entry.session in path
            if entry.version not in path if entry.state == "finished" else not goes_on:
                entry.retry()
        cursor = (self.world if continues else then).cursor
        self.world = World(entries, path, then.trained, checkpoint.step, cursor)
        assert restored.cursor == (str(cursor) if cursor else None)
        self.committed = checkpoint.step

        expected: dict[GroupId, list[tuple[int, str | None, int]]] = {}
        for id, entry in entries.items():
            text = f"{id}:{entry.won}" if entry.state == "finished" else None
            expected.setdefault(id.group, []).append((id.index, text, entry.last))
        got = {
            group.id: [
                (index, s.text if s else None, attempt)
                for index, (s, attempt) in enumerate(zip(group.samples, group.attempts, strict=True))
            ]
            for group in self.runner.run(self.journal.load(restored.groups))
        }
        assert got == expected
        assert list(got) == list(expected), "another order than that of issue"


def test_random_runs_lose_nothing_and_train_on_nothing_twice(
    store_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The assertions are in JournalMachine: after every rule the journal equals the model."""
    JournalMachine.server, JournalMachine.scratch = store_server, tmp_path
    run_state_machine_as_test(
        JournalMachine,
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True),
    )
