"""Checkpoint folders: model, optimizer, data cursor and journal become valid together, by one rename.

checkpoints/step-000100/actor/            model and optimizer; likewise critic/ where the run has one
                        coordinator.json  step, version, cursor, best validation, the algorithm's state
                        journal.bin       enough to rebuild the store
"""

import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.config.schema import Role
from services.coordinator.algorithm import AlgorithmState
from services.coordinator.data import Cursor
from services.runtime.errors import AtollError
from services.wire.types import Version

log = logging.getLogger(__name__)

Save = Callable[[Path], Awaitable[object]]

ACTOR: Role = "actor"
STATE, JOURNAL = "coordinator.json", "journal.bin"


@dataclass(frozen=True, slots=True)
class Best:
    """The validation result that keeps its checkpoint from being removed."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    step: int
    version: Version
    cursor: Cursor | None  # None in a replay
    best: Best | None
    algorithm: AlgorithmState

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> "CoordinatorState":
        best, cursor = tree["best"], tree["cursor"]
        return cls(
            step=tree["step"],
            version=Version(**tree["version"]),
            cursor=None if cursor is None else Cursor.parse(cursor),
            best=None if best is None else Best(**best),
            algorithm=AlgorithmState(**tree["algorithm"]),
        )


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))

    async def save(self, state: CoordinatorState, journal: bytes, models: Mapping[Role, Save]) -> Path:
        """`models`: how each model that learns writes its folder.

        Raises AtollError where the disk does not take it; checkpoints that were there stay valid.
        """
        partial = self._folder / f".partial-{state.step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for role, save in models.items():
                await save(partial / role)
            _write(partial / JOURNAL, journal)
            _write(partial / STATE, json.dumps(asdict(state), indent=2).encode())
            path = self.path(state.step)
            shutil.rmtree(path, ignore_errors=True)  # of a lineage that was left behind
            partial.rename(path)
        except (OSError, AtollError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            valid = self.steps()
            raise AtollError(
                f"checkpoint of step {state.step} in {self._folder}: {error}; "
                + (f"the last valid one is step {valid[-1]}" if valid else "there is no earlier one")
                + "; once that is mended, continue with --resume"
            ) from error
        self._remove_old(state)
        return path

    def load(self, step: int) -> tuple[CoordinatorState, bytes, Path]:
        """State, journal snapshot, and the folder in which each model that learns has its own."""
        path = self.path(step)
        state = CoordinatorState.parse(json.loads((path / STATE).read_text()))
        return state, (path / JOURNAL).read_bytes(), path

    def _remove_old(self, state: CoordinatorState) -> None:
        keep = set(self.steps()[-self._keep :]) | ({state.best.step} if state.best else set())
        for step in self.steps():
            if step not in keep:
                shutil.rmtree(self.path(step))
                log.info("removed the checkpoint of step %d: the last %d are kept", step, self._keep)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
