"""The journal of every sample: issued -> finished -> consumed(step) -> committed(checkpoint).

An issued sample may be open: a session generates it turn by turn. The journal makes a run restartable:
what finished stays in the store until a checkpoint covers the step that consumed it, and the data cursor
moves with the issue of what was drawn. A call is one round trip and one transaction under the coordinator's
fence; long transfers go in parts, over their own connection.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from atoll.coordinator.journal import scripts
from atoll.coordinator.journal.ledger import Ledger
from atoll.coordinator.journal.snapshot import (
    PART,
    JournalSnapshot,
    entries_of,
    payloads_of,
    read_parts,
)
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.store import Script, Store
from atoll.runtime.write_batcher import WriteBatcher
from atoll.wire.codec.trajectories import decode_payload
from atoll.wire.types import GroupId, JournalIndex, SampleId, Trajectory, Version


class JournalError(AtollError):
    """A sample is not in the required state; nothing was written."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A line of policy versions. Of its ancestors, the versions up to the fork belong to it too."""

    name: str
    ancestors: Mapping[str, int]  # lineage -> number of its last version before the fork

    def contains(self, version: Version) -> bool:
        return version.lineage == self.name or version.number <= self.ancestors.get(version.lineage, -1)

    def branch(self, name: str, fork: int) -> "Lineage":
        """The lineage that continues from this one's version `fork`."""
        ancestors = {ancestor: min(last, fork) for ancestor, last in self.ancestors.items()}
        return Lineage(name, ancestors | {self.name: fork})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The point from which a run continues: its last step, the version live after it, and what
    `JournalSnapshot.write` wrote then.

    Without a file (None) the store must still have the journal.
    """

    step: int
    version: Version
    journal: Path | None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An attempt at a sample that is generated turn by turn and has not ended."""

    id: SampleId
    attempt: int
    version: Version  # the newest that made any of its turns


@dataclass(frozen=True, slots=True)
class InFlight:
    """A group that was issued and not trained on; `Journal.load` gives its samples."""

    id: GroupId
    num_samples: int


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A group in flight. Where `samples` has None, the attempt in `attempts` is to be generated."""

    id: GroupId
    samples: tuple[Trajectory | None, ...]  # by index
    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    lineage: str
    cursor: str | None  # the place in the data after the last issue; None: nothing was issued
    groups: tuple[InFlight, ...]  # in the order of their issue


class Journal:
    """The journal of one run. The store must have taken its epoch; `restore` comes first."""

    def __init__(self, store: Store, run: str, ledger: Ledger, max_bytes: int = 4 << 30) -> None:
        """Above `max_bytes` of finished samples in the store it is `full`."""
        self._store = store
        self._bulk = store.new_connection()  # for what is long
        self._run = run
        self._ledger = ledger
        self._lineage = Lineage("", {})
        self._max_bytes = max_bytes
        self._arrivals = WriteBatcher(self._write_finished)
        self.num_bytes = 0  # of the payloads in the store

    @property
    def full(self) -> bool:
        """No more may be issued than the next step needs, and a checkpoint is due, which frees what was
        trained on."""
        return self.num_bytes > self._max_bytes

    async def issue(self, samples: Sequence[SampleId], cursor: str) -> None:
        """These samples are to be generated, from attempt 0 on. Those that are known stay as they are.

        `cursor` (JSON) is the place in the data after them: a restart draws what follows.
        """
        await self._write(scripts.ISSUE, _names(samples), cursor)
        self._ledger.issue(samples, cursor)

    async def open(self, sessions: Sequence[OpenSession]) -> list[OpenSession]:
        """Records that these sessions generate their samples, or have turns of a newer version; a restart
        lets them continue. A session ends with its sample: when an attempt at it finishes, and by `retry`
        and `drop`.

        Returns those that are the last attempt at an unfinished sample; others must not continue.
        """
        args = [
            text
            for s in sessions
            for text in (_name(s.id), s.attempt, f"{s.version.lineage} {s.version.number}")
        ]
        answer: bytes = await self._write(scripts.OPEN, *args)
        return [session for session, flag in zip(sessions, answer.decode(), strict=True) if flag == "1"]

    async def finish(self, samples: Sequence[Trajectory], payload: bytes) -> list[Trajectory]:
        """Keeps finished samples; returns those whose attempt was the first to finish.

        Refuses and counts samples that another attempt has won or that were dropped.
        `payload` is the message that brought the samples, perhaps among others: encoding each again
        would cost more than all the rest of the journal's work.
        """
        attempts = " ".join([f"{_name(sample.id)} {sample.attempt}" for sample in samples])
        accepted = await self._arrivals.write(attempts, payload)
        return [sample for sample, flag in zip(samples, accepted, strict=True) if flag == "1"]

    async def retry(self, samples: Sequence[SampleId], reason: str) -> None:
        """The next attempt at these samples begins. Finished ones are forgotten and may not return;
        of unfinished ones an earlier attempt may still win."""
        await self._write(scripts.RETRY, _names(samples), reason)

    async def drop(self, samples: Sequence[SampleId], reason: str, step: int | None = None) -> None:
        """Forgets these samples. Those that were consumed stay, but for what `step` consumed: its batch
        could not be trained on."""
        self._ledger.drop(samples, reason, step)
        await self._write(scripts.DROP, _names(samples), reason, "" if step is None else step)

    async def consume(self, step: int, samples: Sequence[SampleId]) -> None:
        """`step` trains on these samples. Raises JournalError unless each is finished and not consumed."""
        refusal = await self._write(scripts.CONSUME, _names(samples), step)
        if refusal:
            raise JournalError(f"step {step}: sample {self._run}/{refusal.decode()}; nothing was consumed")
        self._ledger.consume(step, samples)

    async def commit(self, step: int) -> None:
        """A checkpoint covers all steps up to `step`: forgets what they consumed."""
        await self._forget_consumed(step)
        self._ledger.commit(step)

    async def snapshot(self, step: int) -> "JournalSnapshot":
        """All that a checkpoint of `step` needs of the journal: what was issued and not consumed up to it.
        The step after it may be consuming its batch, which a stop then gives up."""
        return JournalSnapshot(self._bulk, await self._index(step))

    async def restore(self, checkpoint: Checkpoint | None) -> Restored:
        """Opens a new lineage that continues from a checkpoint (None: from scratch).

        The store's own tables are newer than the checkpoint's and are used if they stem from that
        checkpoint; if they are lost or belong to another branch, the checkpoint's replace them.
        What was consumed after the checkpoint is finished again, what was dropped stays dropped. A crash
        in the midst of it does no harm: the next restore of the same checkpoint completes it.
        """
        name = secrets.token_hex(4)
        continues = await self._find_continued_lineage(checkpoint)
        step = checkpoint.step if checkpoint else 0
        parent = checkpoint.version if checkpoint else None
        if continues is None:
            await self._rebuild(checkpoint)
        await self._forget_consumed(step)
        # the lineage first: with it, the tables belong to no later checkpoint than this one
        await self._bulk_write(
            scripts.BRANCH, f"{name} {parent.lineage} {parent.number}" if parent else f"{name} - 0"
        )
        while await self._bulk_write(scripts.UNCONSUME, step):
            pass
        index = await self._index(step)
        self._lineage = _lineages(index.lineages)[name]
        groups = await asyncio.to_thread(_in_flight, self._run, index)
        self._ledger.branch(
            name,
            parent,
            step,
            continues=continues,
            cursor=index.cursor,
            pending=(f"{g.id.epoch}/{g.id.prompt}/0-{g.num_samples - 1}" for g in groups),
        )
        return Restored(name, index.cursor, groups)

    async def load(self, groups: Sequence[InFlight]) -> list[RestoredGroup]:
        """The samples of restored groups. What was in progress when the run stopped, and what holds versions
        of a branch that was left, begins its next attempt; open sessions of this branch continue."""
        if not groups:
            return []
        ids = [SampleId(group.id, index) for group in groups for index in range(group.num_samples)]
        finished = await self._load_finished(ids)
        kept = {id: s for id, s in finished.items() if all(map(self._lineage.contains, s.versions()))}
        await self.retry([id for id in ids if id in finished and id not in kept], "lineage")
        lost = {id for id in ids if id not in finished} - await self._open(ids)
        await self.retry([id for id in ids if id in lost], "restart")
        entries = await self._entries(ids)
        return [
            RestoredGroup(
                id=group.id,
                samples=tuple(kept.get(SampleId(group.id, index)) for index in range(group.num_samples)),
                attempts=tuple(
                    int(entries[SampleId(group.id, index)].split()[2]) for index in range(group.num_samples)
                ),
            )
            for group in groups
        ]

    async def counts(self) -> dict[str, int]:
        """How many samples were "refused", "retried: KIND" and "dropped: KIND" so far."""
        cells = await self._store.read("HGETALL", "journal/counts")
        return {name.decode(): int(value) for name, value in zip(cells[::2], cells[1::2], strict=True)}

    async def _write_finished(self, messages: Sequence[str | bytes]) -> list[str]:
        """Of each message, "1" or "0" for each sample. `messages`: names with attempts, payload, ..."""
        answer: bytes = await self._write(scripts.FINISH, *messages)
        num_bytes, *accepted = answer.decode().split(" ")
        self.num_bytes = int(num_bytes)
        return accepted

    async def _write(self, script: Script, *args: str | bytes | int) -> Any:
        return await self._store.write(script, scripts.TABLES, *args)

    async def _bulk_write(self, script: Script, *args: str | bytes | int) -> Any:
        return await self._bulk.write(script, scripts.TABLES, *args)

    async def _forget_consumed(self, step: int) -> None:
        forgotten = 1
        while forgotten:
            forgotten, self.num_bytes = await self._bulk_write(scripts.COMMIT, step)

    async def _index(self, step: int) -> JournalIndex:
        """What is issued or finished and not consumed up to `step`, at one moment."""
        cursor, lineages = await self._bulk_write(scripts.COPY, step)
        return JournalIndex(
            issued=await self._read_copy("issued"),
            finished=await self._read_copy("finished"),
            cursor=cursor.decode() if cursor else None,
            lineages=tuple(record.decode() for record in lineages),
        )

    async def _read_copy(self, table: str) -> bytes:
        parts, place = [], b""
        while place != b"0":
            place, part = await self._bulk_write(scripts.READ, table, place or b"0")
            parts.append(part)
        return b" ".join(parts)

    async def _find_continued_lineage(self, checkpoint: Checkpoint | None) -> str | None:
        """The lineage of the store's tables, if they are a continuation of the checkpoint's."""
        if checkpoint is None:
            return None
        records = await self._bulk.read("LRANGE", "journal/lineages", 0, -1)
        committed = int(await self._bulk.read("HGET", "journal/counts", "committed") or 0)
        if not records or committed > checkpoint.step:
            return None
        *_, current = _lineages(record.decode() for record in records).values()
        return current.name if current.contains(checkpoint.version) else None

    async def _rebuild(self, checkpoint: Checkpoint | None) -> None:
        """Replaces the tables by the checkpoint's, which are read in parts."""
        if checkpoint is not None and checkpoint.journal is None:
            raise UserError(
                f"the store lacks the journal of the run {self._run}: it is lost, or of an earlier version "
                "of Atoll, and there is no checkpoint to replace it; start a new run"
            )
        await self._bulk_write(scripts.CLEAR)
        if checkpoint is None or checkpoint.journal is None:
            return
        parts = read_parts(checkpoint.journal)
        while isinstance(part := await asyncio.to_thread(next, parts), list):
            await self._bulk_write(scripts.FILL_PAYLOADS, *part)
        index = part
        last_issued = last_payload = 0
        for script, table, width in (
            (scripts.FILL_ISSUED, index.issued, 4),
            (scripts.FILL_FINISHED, index.finished, 5),
        ):
            entries = entries_of(table, width)
            while part_of_table := list(islice(entries, PART)):
                await self._bulk_write(script, *chain.from_iterable(part_of_table))
                numbers = [entry.split() for _, entry in part_of_table]
                last_issued = max(last_issued, *(int(words[0]) for words in numbers))
                if width == 5:
                    last_payload = max(last_payload, *(int(words[1]) for words in numbers))
        await self._bulk_write(scripts.SEAL, last_issued, last_payload, index.cursor or "", *index.lineages)

    async def _load_finished(self, ids: Sequence[SampleId]) -> dict[SampleId, Trajectory]:
        """Those of `ids` that are finished; a payload may hold other samples and attempts beside them."""
        entries = {id: entry.split() for id, entry in (await self._entries(ids)).items()}
        won = {id: int(words[3]) for id, words in entries.items() if len(words) == 4}
        numbers = dict.fromkeys(entries[id][1] for id in won)
        samples = {}
        async for part in payloads_of(self._bulk, list(numbers)):
            for sample in await asyncio.to_thread(_decode, [payload for _, payload in part if payload]):
                if won.get(sample.id) == sample.attempt:
                    samples[sample.id] = sample
        return samples

    async def _open(self, ids: Sequence[SampleId]) -> set[SampleId]:
        """Those of `ids` that a session of this branch generates."""
        entries = await self._bulk.read("HMGET", "journal/open", *map(_name, ids))
        going_on = set()
        for id, entry in zip(ids, entries, strict=True):
            if entry is not None:
                _, lineage, number = entry.decode().split()
                if self._lineage.contains(Version(lineage, int(number))):
                    going_on.add(id)
        return going_on

    async def _entries(self, ids: Sequence[SampleId]) -> dict[SampleId, str]:
        """Of those that are issued or finished; the latter have four words."""
        entries: dict[SampleId, str] = {}
        for first in range(0, len(ids), PART):
            part = ids[first : first + PART]
            issued, finished = await self._bulk_write(scripts.ENTRIES, _names(part))
            for id, value, other in zip(part, issued, finished, strict=True):
                if (entry := value or other) is not None:
                    entries[id] = entry.decode()
        return entries


def _decode(payloads: Iterable[bytes]) -> list[Trajectory]:
    return [sample for payload in payloads for sample in decode_payload(payload)]


def _in_flight(run: str, index: JournalIndex) -> tuple[InFlight, ...]:
    """The groups of an index in the order of their issue."""
    firsts: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    for table, width in ((index.issued, 4), (index.finished, 5)):
        for name, entry in entries_of(table, width):
            epoch, prompt, member = map(int, name.split("/"))
            key, number = (epoch, prompt), int(entry.partition(" ")[0])
            firsts[key] = min(firsts.get(key, number), number)
            sizes[key] = max(sizes.get(key, 0), member + 1)
    return tuple(InFlight(GroupId(run, *key), sizes[key]) for key in sorted(firsts, key=firsts.__getitem__))


def _name(id: SampleId) -> str:
    return f"{id.group.epoch}/{id.group.prompt}/{id.index}"


def _names(samples: Iterable[SampleId]) -> str:
    return " ".join(map(_name, samples))


def _lineages(records: Iterable[str]) -> dict[str, Lineage]:
    lineages: dict[str, Lineage] = {}
    for record in records:
        name, parent, fork = record.split()
        lineages[name] = lineages[parent].branch(name, int(fork)) if parent in lineages else Lineage(name, {})
    return lineages
