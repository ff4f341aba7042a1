"""Checkpoint folders: model, optimizer and journal become valid together, by one rename.

checkpoints/step-000100/actor/            model and optimizer; likewise critic/ where the run has one
                        coordinator.json  step, version, best validation, the algorithm's state
                        journal.bin       enough to rebuild the store: data cursor, samples in flight
            left-000120-1/              left by a resume from an earlier step
"""

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.config.schema import Role
from atoll.coordinator.algorithm.algorithm import AlgorithmState
from atoll.coordinator.algorithm.filters import Counters
from atoll.coordinator.data.datasets import Cursor
from atoll.runtime.errors import (
    AtollError,
    DamagedCheckpointError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.types import CheckpointWrite, Version

log = logging.getLogger(__name__)

Committed = Callable[[Path], Awaitable[None]]

ACTOR: Role = "actor"
STATE, JOURNAL = "coordinator.json", "journal.bin"
FORMAT = 2  # of a checkpoint folder; 1 had the data cursor in coordinator.json
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class BestValidation:
    """The best validation result, whose checkpoint is kept."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    step: int
    version: Version
    cursor: Cursor | None  # in supervised; what is generated has its cursor in the journal
    best: BestValidation | None
    algorithm: AlgorithmState
    row: Mapping[str, float] = field(
        default_factory=dict
    )  # the step's metrics, which may not be in the metrics file yet
    seconds: float = 0.0  # that the run took until then
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> "CoordinatorState":
        best, cursor = tree["best"], tree["cursor"]
        return cls(
            step=tree["step"],
            version=Version(**tree["version"]),
            cursor=None if cursor is None else Cursor.parse(json.dumps(cursor)),
            best=None if best is None else BestValidation(**best),
            algorithm=AlgorithmState(**tree["algorithm"]),
            row=tree.get("row", {}),
            seconds=tree.get("seconds", 0.0),
            counters=Counters(**tree.get("counters", {})),
        )


class JournalWriter(Protocol):
    """The journal at the checkpoint's moment."""

    async def write(self, path: Path) -> None: ...


class CheckpointedModel(Protocol):
    """A model that learns."""

    async def save_checkpoint(self, path: Path) -> None: ...
    async def wait_checkpoint(self, path: Path) -> CheckpointWrite: ...


class Checkpoints:
    """The checkpoints of one run; at most one is being written."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._write: asyncio.Task[list[CheckpointWrite]] | None = None
        self._metrics: dict[str, float] = {}

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        names = (_STEP.fullmatch(path.name) for path in self._folder.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    async def begin(
        self,
        state: CoordinatorState,
        journal: JournalWriter,
        models: Mapping[Role, CheckpointedModel],
        committed: Committed,
    ) -> None:
        """Returns once every model has copied its state. The rest runs in the background: the models write,
        the folder becomes valid, then `committed` is called with it. A second checkpoint waits for the
        first.
        """
        await self.finish()
        partial = self._folder / f".partial-{state.step:06d}"
        with self._explain_failure(state.step):
            for left in self._folder.glob(".*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            await asyncio.gather(*(model.save_checkpoint(partial / role) for role, model in models.items()))
        self._write = asyncio.create_task(self._commit(partial, state, journal, models, committed))

    async def finish(self) -> None:
        """Waits for the write in progress. Raises AtollError if it failed; earlier checkpoints stay valid."""
        write, self._write = self._write, None
        if write is not None:
            written = await write
            self._metrics = {
                "checkpoint/write_s": max((part.seconds for part in written), default=0.0),
                "checkpoint/num_bytes": float(sum(part.num_bytes for part in written)),
            }

    async def take_metrics(self) -> dict[str, float]:
        """Of the last write that has ended since the last call. Raises AtollError if it failed."""
        if self._write is not None and self._write.done():
            await self.finish()
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def abandon(self) -> None:
        """Cancels a write in progress, unless its folder is just becoming valid. Nothing runs on
        afterwards.
        """
        write, self._write = self._write, None
        if write is not None:
            write.cancel()
            await asyncio.wait([write])

    async def _commit(
        self,
        partial: Path,
        state: CoordinatorState,
        journal: JournalWriter,
        models: Mapping[Role, CheckpointedModel],
        committed: Committed,
    ) -> list[CheckpointWrite]:
        """Waits for the models' writes; what it does to the disk itself, it does in a thread."""
        with self._explain_failure(state.step):
            await journal.write(partial / JOURNAL)
            written = await asyncio.gather(
                *(model.wait_checkpoint(partial / role) for role, model in models.items())
            )
            publishing = asyncio.create_task(asyncio.to_thread(self._publish, partial, state))
            try:
                await asyncio.shield(publishing)
            finally:
                await asyncio.wait([publishing])  # a thread continues although its caller is cancelled
        await committed(self.path(state.step))
        return written

    def _publish(self, partial: Path, state: CoordinatorState) -> None:
        tree = {"format": FORMAT, **asdict(state)}
        _write(partial / STATE, json.dumps(tree, indent=2).encode())
        _fsync(partial / JOURNAL)
        _fsync(partial)
        if state.step in self.steps():  # of a lineage that was left behind
            self._set_aside(state.step)
        partial.rename(self.path(state.step))
        _fsync(self._folder)  # before those that it replaces go
        self._remove_old(state)

    @contextmanager
    def _explain_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except ServiceUnavailableError:
            raise  # a trainer was lost, not a checkpoint
        except (OSError, AtollError) as error:
            shutil.rmtree(self._folder / f".partial-{step:06d}", ignore_errors=True)
            valid = self.steps()
            raise AtollError(
                f"checkpoint of step {step} in {self._folder}: {error}; "
                + (f"the last valid one is step {valid[-1]}" if valid else "there is no earlier one")
                + "; fix the cause, then continue with --resume"
            ) from error

    def load(self, step: int) -> tuple[CoordinatorState, Path, Path]:
        """State, the journal's file, and the folder in which each model that learns has its own.

        Raises UserError for a checkpoint of another version, DamagedCheckpointError for a broken one.
        """
        path = self.path(step)
        try:
            tree = json.loads((path / STATE).read_text())
        except (FileNotFoundError, ValueError) as error:
            raise DamagedCheckpointError(f"{path} is damaged: {STATE}: {error}") from None
        if not (path / JOURNAL).exists():
            raise DamagedCheckpointError(f"{path} is damaged: it has no {JOURNAL}")
        if tree.get("format", 1) != FORMAT:
            raise UserError(
                f"{path} was written by another version of Atoll (checkpoint format {tree.get('format', 1)}, "
                f"this one reads {FORMAT}): continue the run with that version, or start a new one"
            )
        state = CoordinatorState.parse(tree)
        return state, path / JOURNAL, path

    @contextmanager
    def explain_damage(self, step: int) -> Iterator[None]:
        """Adds to a DamagedCheckpointError of `step` which older checkpoint there is."""
        try:
            yield
        except DamagedCheckpointError as error:
            older = [number for number in self.steps() if number < step]
            advice = (
                f"resume from an older one: --resume --step {older[-1]}" if older else "there is no older one"
            )
            raise DamagedCheckpointError(f"{error}; {advice}") from error

    def leave_after(self, step: int) -> list[Path]:
        """Renames later checkpoints than that of `step`, which the run then continues from. Returns their
        new paths. Raises UserError if `step` has none.
        """
        there = self.steps()
        if step not in there:
            kept = ", ".join(map(str, there)) or "none"
            raise UserError(f"{self._folder} has no checkpoint of step {step}, only of: {kept}")
        left = []
        for later in there:
            if later > step:
                number = 1 + sum(1 for _ in self._folder.glob(f"left-{later:06d}-*"))
                left.append(self.path(later).rename(self._folder / f"left-{later:06d}-{number}"))
        return left

    def _remove_old(self, state: CoordinatorState) -> None:
        keep = set(self.steps()[-self._keep :]) | ({state.best.step} if state.best else set())
        for step in self.steps():
            if step not in keep:
                self._set_aside(step)
                log.info("removed the checkpoint of step %d: the last %d are kept", step, self._keep)
        for removed in self._folder.glob(".removed-*"):
            shutil.rmtree(removed)

    def _set_aside(self, step: int) -> None:
        """A half-removed folder is not a checkpoint."""
        self.path(step).rename(self._folder / f".removed-{step:06d}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
