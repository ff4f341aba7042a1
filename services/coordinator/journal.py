"""What became of every sample: issued -> finished -> consumed(step) -> committed(checkpoint).

The journal makes a run restartable: what finished stays in the store until a checkpoint covers the
step that consumed it. A call is one round trip and one transaction under the coordinator's fence.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.coordinator import journal_scripts as scripts
from services.runtime.errors import AtollError
from services.runtime.store import Script, Store
from services.wire import codec
from services.wire.types import GroupId, JournalSnapshot, Sample, SampleId, Version


class JournalError(AtollError):
    """A sample is not in the state that the call builds on; nothing was written."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A line of policy versions. Of its ancestors, the versions up to the fork belong to it too."""

    name: str
    ancestors: Mapping[str, int]  # lineage -> number of its last version before the fork

    def contains(self, version: Version) -> bool:
        return version.lineage == self.name or version.number <= self.ancestors.get(version.lineage, -1)

    def branch(self, name: str, fork: int) -> "Lineage":
        """The lineage that goes on from this one's version `fork`."""
        ancestors = {ancestor: min(last, fork) for ancestor, last in self.ancestors.items()}
        return Lineage(name, ancestors | {self.name: fork})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run goes on: its last step, the version live after it, and `Journal.snapshot` from then."""

    step: int
    version: Version
    journal: bytes


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A group in flight. Where `samples` has None, the attempt in `attempts` is to be generated."""

    id: GroupId
    samples: tuple[Sample | None, ...]  # by index
    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    lineage: str
    groups: tuple[RestoredGroup, ...]  # in the order of their issue


class Journal:
    """The journal of one run. The store must have taken its epoch; `restore` comes first."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run

    async def issue(self, samples: Sequence[SampleId]) -> None:
        """These samples are to be generated, from attempt 0 on. Those that are known stay as they are."""
        await self._write(scripts.ISSUE, _names(samples))

    async def finish(self, samples: Sequence[Sample], payload: bytes) -> list[Sample]:
        """Keeps finished samples; returns those whose attempt was the first to finish.

        Refuses, and counts, what another attempt has won or what was dropped in the meantime.
        `payload` is the message that brought the samples, perhaps among others: encoding each again
        would cost more than all the rest of the journal's work.
        """
        attempts = " ".join(f"{_name(sample.id)} {sample.attempt}" for sample in samples)
        accepted = await self._write(scripts.FINISH, attempts, payload)
        return [sample for sample, flag in zip(samples, accepted.decode(), strict=True) if flag == "1"]

    async def retry(self, samples: Sequence[SampleId], reason: str) -> None:
        """The next attempt at these samples begins. Finished ones are forgotten and may not return;
        of unfinished ones an earlier attempt may still win."""
        await self._write(scripts.RETRY, _names(samples), reason)

    async def drop(self, samples: Sequence[SampleId], reason: str) -> None:
        """Forgets these samples, in whatever state they are."""
        await self._write(scripts.DROP, _names(samples), reason)

    async def consume(self, step: int, samples: Sequence[SampleId]) -> None:
        """`step` trains on these samples. Raises JournalError unless each is finished and not consumed."""
        refusal = await self._write(scripts.CONSUME, _names(samples), step)
        if refusal:
            raise JournalError(f"step {step}: sample {self._run}/{refusal.decode()}; nothing was consumed")

    async def commit(self, step: int) -> None:
        """A checkpoint covers all steps up to `step`: forgets what they consumed."""
        await self._write(scripts.COMMIT, step)

    async def snapshot(self, step: int) -> bytes:
        """All that a checkpoint of `step` needs of the journal: what was issued and not consumed up to it.
        The step after it may be consuming its batch, which a stop then gives up."""
        return codec.encode_journal(await self._read(step))

    async def restore(self, checkpoint: Checkpoint | None) -> Restored:
        """Opens a new lineage that goes on from a checkpoint (None: from scratch).

        The store's own tables are newer than the checkpoint's and are used where they stem from that
        checkpoint; where they are lost or belong to another branch, the checkpoint's replace them.
        What was consumed after the checkpoint is finished again. What was under way, and what holds
        versions of a branch that was left, begins its next attempt.
        """
        name = secrets.token_hex(4)
        if checkpoint is None:
            await self._rebuild(JournalSnapshot({}, {}, {}, ()))
            await self._write(scripts.BRANCH, f"{name} - 0")
            return Restored(name, ())
        if not await self._holds(checkpoint):
            await self._rebuild(codec.decode_journal(checkpoint.journal))
        await self.commit(checkpoint.step)
        await self._write(scripts.BRANCH, f"{name} {checkpoint.version.lineage} {checkpoint.version.number}")

        tables = await self._read(checkpoint.step)
        lineage = _lineages(tables.lineages)[name]
        samples = self._finished(tables)
        kept = {id: s for id, s in samples.items() if all(map(lineage.contains, s.versions()))}
        await self.retry([id for id in samples if id not in kept], "lineage")
        await self.retry([self._id(sample) for sample in tables.issued], "restart")
        return Restored(name, self._groups(await self._read(checkpoint.step), kept))

    async def counts(self) -> dict[str, int]:
        """How many samples were "refused", "retried: REASON" and "dropped: REASON" so far."""
        cells = await self._store.read("HGETALL", "journal/counts")
        return {name: int(value) for name, value in _table(cells).items()}

    async def _write(self, script: Script, *args: str | bytes | int) -> Any:
        return await self._store.write(script, scripts.TABLES, *args)

    async def _read(self, step: int) -> JournalSnapshot:
        """What is issued or finished and not consumed up to `step`."""
        issued, finished, payloads, consumed, lineages = await self._write(scripts.READ, step)
        trained = {name.decode() for name in consumed}
        rest = {name: value for name, value in _table(finished).items() if name not in trained}
        numbers = {value.split()[1].encode() for value in rest.values()}
        return JournalSnapshot(
            issued=_table(issued),
            finished=rest,
            payloads={
                number.decode(): payload
                for number, payload in zip(payloads[::2], payloads[1::2], strict=True)
                if number in numbers
            },
            lineages=tuple(record.decode() for record in lineages),
        )

    async def _rebuild(self, tables: JournalSnapshot) -> None:
        cells: list[str | bytes | int] = []
        for table in (tables.issued, tables.finished, tables.payloads):
            cells.append(len(table))
            for pair in table.items():
                cells += pair
        await self._write(scripts.REBUILD, *cells, *tables.lineages)

    async def _holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the store's tables are a continuation of the checkpoint's."""
        records = await self._store.read("LRANGE", "journal/lineages", 0, -1)
        committed = int(await self._store.read("HGET", "journal/counts", "committed") or 0)
        if not records or committed > checkpoint.step:
            return False
        *_, current = _lineages(record.decode() for record in records).values()
        return current.contains(checkpoint.version)

    def _finished(self, tables: JournalSnapshot) -> dict[SampleId, Sample]:
        """The samples whose attempt won; their payloads may hold others beside them."""
        samples = {}
        for number, payload in tables.payloads.items():
            for sample in codec.decode_payload(payload):
                won = tables.finished.get(_name(sample.id), "").split()
                if won[1:2] == [number] and int(won[3]) == sample.attempt:
                    samples[sample.id] = sample
        return samples

    def _groups(self, tables: JournalSnapshot, kept: Mapping[SampleId, Sample]) -> tuple[RestoredGroup, ...]:
        groups: dict[GroupId, dict[int, tuple[Sample | None, int]]] = {}
        values = {**tables.issued, **tables.finished}
        for name in sorted(values, key=lambda name: int(values[name].split()[0])):
            id = self._id(name)
            groups.setdefault(id.group, {})[id.index] = (kept.get(id), int(values[name].split()[2]))
        return tuple(
            RestoredGroup(
                id=group,
                samples=tuple(sample for _, (sample, _) in sorted(members.items())),
                attempts=tuple(attempt for _, (_, attempt) in sorted(members.items())),
            )
            for group, members in groups.items()
        )

    def _id(self, name: str) -> SampleId:
        return SampleId.parse(f"{self._run}/{name}")


def _name(id: SampleId) -> str:
    return f"{id.group.epoch}/{id.group.prompt}/{id.index}"


def _names(samples: Iterable[SampleId]) -> str:
    return " ".join(map(_name, samples))


def _table(cells: Sequence[bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in zip(cells[::2], cells[1::2], strict=True)}


def _lineages(records: Iterable[str]) -> dict[str, Lineage]:
    lineages: dict[str, Lineage] = {}
    for record in records:
        name, parent, fork = record.split()
        lineages[name] = lineages[parent].branch(name, int(fork)) if parent in lineages else Lineage(name, {})
    return lineages
