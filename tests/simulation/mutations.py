"""Faults as a change of the dataflow might bring them in; each must be noticed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from atoll.coordinator.data.datasets import PromptSource
from atoll.coordinator.journal import scripts
from atoll.coordinator.journal.checkpoints import Checkpoints
from atoll.coordinator.journal.journal import Checkpoint, InFlight, Journal, Restored
from atoll.coordinator.journal.ledger import Ledger
from atoll.coordinator.journal.snapshot import JournalSnapshot, read_parts
from atoll.coordinator.rollouts.generate_call import GenerateCall
from atoll.coordinator.rollouts.group_sources import GenerateSource
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.store import Script
from atoll.wire.types import Group, JournalIndex, Prompt, SampleId, Trajectory, Version

Mutation = Callable[[], AbstractContextManager[object]]


def edited(script: str, line: str, other: str = "") -> Mutation:
    """One line of a script of the journal is another, or none."""

    def mutation() -> AbstractContextManager[object]:
        before: Script = getattr(scripts, script)
        assert before.body.count(line) == 1, f"{script} has changed: {line!r} is not in it once"
        return patch.object(scripts, script, Script(before.body.replace(line, other)))

    return mutation


def left_out(owner: type, method: str) -> Mutation:
    """A method without arguments to return does nothing."""

    def nothing(*arguments: object, **options: object) -> None: ...

    return lambda: patch.object(owner, method, nothing)


def together(*mutations: Mutation) -> Mutation:
    """A fault behind a check that would catch it at once."""

    @contextmanager
    def mutation() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in mutations:
                stack.enter_context(part())
            yield

    return mutation


class _Skipping:
    """Prompts but for those that this process was given when it was restored."""

    def __init__(self, prompts: PromptSource, restored: Iterable[InFlight]) -> None:
        self._prompts = prompts
        self._restored = {group.id for group in restored}

    def draw(self, count: int) -> list[Prompt]:
        drawn: list[Prompt] = []
        while len(drawn) < count:
            drawn += (p for p in self._prompts.draw(count - len(drawn)) if p.id not in self._restored)
        return drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompts, name)


@contextmanager
def cursor_of_the_checkpoint() -> Iterator[None]:
    """Restored groups are not drawn again by this process; the next one knows nothing of them."""
    restore, take_up = Journal.restore, GenerateSource.restore

    async def restore_old(self: Journal, checkpoint: Checkpoint | None) -> Restored:
        restored, cursor = await restore(self, checkpoint), None
        if checkpoint is not None and checkpoint.journal is not None:
            *_, index = read_parts(checkpoint.journal)
            assert isinstance(index, JournalIndex)
            cursor = index.cursor
            await self._write(scripts.ISSUE, "", cursor)
        return replace(restored, cursor=cursor)

    def skip(self: GenerateSource, restored: Sequence[InFlight], *others: Any) -> None:
        take_up(self, restored, *others)
        self._prompts = _Skipping(self._prompts, restored)  # type: ignore[assignment]

    with patch.object(Journal, "restore", restore_old), patch.object(GenerateSource, "restore", skip):
        yield


def branch_twice() -> AbstractContextManager[object]:
    """The second time is after the first batch of the new lineage."""
    restore, consume = Journal.restore, Journal.consume
    steps: dict[Journal, int] = {}

    async def note(journal: Journal, checkpoint: Checkpoint | None) -> Restored:
        steps[journal] = checkpoint.step if checkpoint else 0
        return await restore(journal, checkpoint)

    async def consume_and_branch(journal: Journal, step: int, samples: Sequence[SampleId]) -> None:
        await consume(journal, step, samples)
        if (restored := steps.pop(journal, None)) is not None:
            await journal._bulk_write(scripts.UNCONSUME, restored)

    return patch.multiple(Journal, restore=note, consume=consume_and_branch)


def commit_before_the_checkpoint() -> AbstractContextManager[object]:
    """Nor is it noticed that the store's tables belong to a later checkpoint."""
    begin = Checkpoints.begin

    async def commit_first(self: Checkpoints, state: Any, journal: Any, models: Any, committed: Any) -> None:
        await committed(self.path(state.step))
        await begin(self, state, journal, models, committed)

    return patch.object(Checkpoints, "begin", commit_first)


def handed_out_twice() -> AbstractContextManager[object]:
    """A group that was taken is ready again afterwards."""
    take = GenerateSource.take

    async def take_and_keep(self: GenerateSource, step: int, count: int, current: Version) -> list[Group]:
        known = dict(self._ready)
        groups = await take(self, step, count, current)
        for group in groups[:1] if step == 5 else ():
            self._ready |= {id: known[id] for id in known if id == group.prompt.id}
        return groups

    return patch.object(GenerateSource, "take", take_and_keep)


def believed() -> AbstractContextManager[object]:
    """Whatever arrives is taken, in place of what was there."""

    def take(self: PendingGroup, sample: Trajectory) -> bool:
        self.samples[sample.id.index] = sample
        return True

    return patch.object(PendingGroup, "accept", take)


def snapshot_of_the_step_before() -> AbstractContextManager[object]:
    snapshot = Journal.snapshot

    async def older(self: Journal, step: int) -> JournalSnapshot:
        return await snapshot(self, step - 1)

    return patch.object(Journal, "snapshot", older)


def snapshot_without_issued() -> AbstractContextManager[object]:
    snapshot = Journal.snapshot

    async def partial(self: Journal, step: int) -> JournalSnapshot:
        whole = await snapshot(self, step)
        return JournalSnapshot(whole._store, replace(whole._index, issued=b""))

    return patch.object(Journal, "snapshot", partial)


MUTATIONS: Mapping[str, Mutation] = {
    "the data cursor is the checkpoint's": cursor_of_the_checkpoint,
    "ISSUE leaves the cursor where it was": edited("ISSUE", "redis.call('SET', cursor, ARGV[2])"),
    "RETRY forgets its samples": edited("RETRY", "bulk('HSET', issued, values)"),
    "DROP does not reach the store": edited("DROP", "\nforget(samples)"),
    "DROP does not reach the ledger": left_out(Ledger, "drop"),
    "ISSUE does not reach the ledger": left_out(Ledger, "issue"),
    "CONSUME does not reach the store": edited("CONSUME", "local samples", "do return '' end\nlocal samples"),
    "CONSUME does not reach the ledger": left_out(Ledger, "consume"),
    "CONSUME does not look, and a group is handed out twice": together(
        handed_out_twice,
        edited("CONSUME", "if steps[i]", "if false and steps[i]"),
        edited("CONSUME", "if not done[i]", "if false"),
        edited("CONSUME", "= done[i]", "= done[i] or '0 0 0 0'"),
    ),
    "COMMIT comes before its checkpoint": together(
        commit_before_the_checkpoint, edited("COMMIT", "redis.call('HSET', counts, 'committed', ARGV[1])")
    ),
    "COMMIT forgets what later steps consumed": edited("COMMIT", "'-inf', ARGV[1]", "'-inf', '+inf'"),
    "what was consumed after the checkpoint stays so": edited(
        "UNCONSUME", "local samples", "do return 0 end\nlocal samples"
    ),
    "BRANCH is done twice": branch_twice,
    "a snapshot leaves out what is issued": snapshot_without_issued,
    "a snapshot has what its last step trained on": snapshot_of_the_step_before,
    "restored groups are forgotten": left_out(GenerateSource, "restore"),
    "an answer counts as often as it comes": together(left_out(GenerateCall, "accept"), believed),
}
