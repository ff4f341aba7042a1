"""Saves and restores a learner in torch.distributed's checkpoint format, which any parallel layout can load.

A save copies the state to host memory and returns; a thread writes the copy while training continues. A
folder appears under its name only when it is complete and on disk. The trainer draws no random numbers, so
weights, optimizer state and the number of updates suffice for a resume, which on a CPU is exact to the bit.
"""

import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from atoll.runtime.errors import (
    CheckpointError,
    DamagedCheckpointError,
    LostStateError,
    ServiceUnavailableError,
    UserError,
)
from atoll.trainer import progress
from atoll.trainer.command_channel import IDLE_TIMEOUT
from atoll.trainer.offload import HostMemory
from atoll.trainer.state import (
    Locate,
    TensorBoxes,
    allocate_state,
    apply_loaded_state,
    at_place,
    frozen_checksum,
    snapshot,
)
from atoll.trainer.step import Learner
from atoll.wire.types import CheckpointWrite

DESCRIPTION_FILE = "trainer.json"  # describes the saved state


class Checkpointer:
    """Every rank makes the same calls in the same order, from its compute thread.

    Writing has a thread and a process group of its own, so that its collectives never meet those of
    training. Of two saves, the second waits until the first is written.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        if torch.cuda.is_available():  # a new thread uses GPU 0, whatever the others of its process use
            self._thread.submit(torch.cuda.set_device, torch.cuda.current_device())
        self._host = HostMemory()
        self._writing: tuple[Path, Future[CheckpointWrite]] | None = None

    def save(self, learner: Learner, path: Path, locate: Locate = at_place) -> "Future[CheckpointWrite]":
        """Begins to write the folder `path`, in place of one of that name. `locate`: of what is off-loaded,
        see ModelOffloader.

        The result raises CheckpointError on every rank where the folder cannot be written, as on a full
        disk; `path` is then as before. Its bytes are known on rank 0.
        """
        self._wait()
        about = self._describe(learner, locate)
        writing = self._thread.submit(self._write, snapshot(learner, locate, self._host.copy), about, path)
        self._writing = path, writing
        return writing

    def writing(self, path: Path) -> "Future[CheckpointWrite]":
        """The last save. Raises LostStateError if that is not of `path`."""
        if self._writing is None or self._writing[0] != path:
            raise LostStateError(f"nothing is being written to {path}: the trainer has restarted, save again")
        return self._writing[1]

    def load(self, learner: Learner, path: Path) -> None:
        """Restores what `save` wrote, on any layout. Raises DamagedCheckpointError if files are missing or
        unreadable, UserError if they are of another model."""
        self._wait()
        about = _read_description(path)
        _check_model(about, self._describe(learner, at_place), path)
        state = allocate_state(learner, about["num_updates"])
        try:
            load_state_dict(
                state,
                storage_reader=FileSystemReader(path),
                planner=_LoadBoxes(flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise _load_error(path, error) from error
        apply_loaded_state(learner)
        learner.num_updates = about["num_updates"]
        learner.reset()

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()

    def _describe(self, learner: Learner, locate: Locate) -> dict[str, Any]:
        """As JSON gives it back."""
        about = {
            "num_updates": learner.num_updates,
            "model": asdict(learner.model.spec),
            "frozen": frozen_checksum(learner, self._group, locate),
        }
        return json.loads(json.dumps(about))  # type: ignore[no-any-return]

    def _wait(self) -> None:
        if self._writing is not None:
            wait([self._writing[1]])

    def _write(self, state: dict[str, TensorBoxes], about: dict[str, Any], path: Path) -> CheckpointWrite:
        """In the checkpoint thread of every rank; unblocked by the other ranks' parts, or their death."""
        begun = time.monotonic()
        partial = path.with_name(path.name + ".partial")
        try:
            if dist.get_rank() == 0:  # nobody writes a file before all ranks have a plan
                shutil.rmtree(partial, ignore_errors=True)
            writer = _Publication(partial, path, about)
            save_state_dict(
                state,
                storage_writer=writer,
                planner=_SaveBoxes(flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as error:  # every rank gets it
            raise _write_error(partial, path, error) from error
        except RuntimeError as error:
            raise ServiceUnavailableError(
                f"checkpoint {path} was not written: another rank of this trainer exited ({error})"
            ) from error
        return CheckpointWrite(writer.num_bytes, time.monotonic() - begun)


class _SaveBoxes(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        progress.advance()
        return self.state_dict[index.fqn].at(index)  # type: ignore[no-any-return]


class _LoadBoxes(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As PyTorch's own, which goes through the values first and drops what is no tensor."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        progress.advance()
        return self.state_dict[index.fqn].at(index)  # type: ignore[no-any-return]


class _Publication(FileSystemWriter):
    """Puts the folder in its place once all ranks have written their parts of it."""

    def __init__(self, partial: Path, path: Path, about: dict[str, Any]) -> None:
        super().__init__(partial, sync_files=True)
        self._partial, self._place, self._describe = partial, path, about
        self.num_bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "TorchFuture[list[WriteResult]]":
        """PyTorch's archive ends with an error of its own where the disk has refused a part of it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on rank 0; its exceptions reach every rank."""
        super().finish(metadata, results)
        (self._partial / DESCRIPTION_FILE).write_text(json.dumps(self._describe))
        files = list(self._partial.iterdir())
        for file in [*files, self._partial]:
            _fsync(file)
        if self._place.exists():
            shutil.rmtree(self._place)
        self._partial.rename(self._place)
        _fsync(self._place.parent)
        self.num_bytes = sum(file.stat().st_size for file in self._place.iterdir())


def _check_model(saved: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Tensors that fit by their shapes alone could be another model's."""
    theirs, ours = saved["model"], own["model"]
    differences = [
        f"its {name} is {theirs.get(name)}, expected {ours.get(name)}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if saved["frozen"] != own["frozen"]:
        differences.append(f"it holds {_kind(saved)}, expected {_kind(own)}")
    if differences:
        raise UserError(
            f"{path} does not fit this model: {'; '.join(differences)}. Resume with the model it was made of"
        )


def _kind(about: dict[str, Any]) -> str:
    if about["frozen"] is None:
        return "all weights"
    return f"adapters on top of weights with checksum {about['frozen']}"


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION_FILE
    if not file.exists():
        raise DamagedCheckpointError(f"{path} is not a trainer checkpoint: it has no {DESCRIPTION_FILE}")
    try:
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {DESCRIPTION_FILE}: {error}") from None


def _load_error(path: Path, error: CheckpointException) -> UserError:
    """The description fits already, so other tensors (which PyTorch tells by these errors) are rare."""
    cause, _ = next(iter(error.failures.values()))
    if isinstance(cause, ValueError) or "Missing key" in str(cause):
        return UserError(
            f"{path} does not fit this model: {_cause(error)}; resume with the model it was made of"
        )
    return DamagedCheckpointError(f"{path} is damaged: {_cause(error)}")


def _write_error(partial: Path, path: Path, error: CheckpointException) -> CheckpointError:
    free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return CheckpointError(
        f"checkpoint {path} was not written: {_cause(error)} ({free:,} bytes are free on its disk); those "
        "before it are untouched. Free some space or fix the path, then save again"
    )


def _cause(error: CheckpointException) -> str:
    """The cause on the first rank that failed."""
    cause, _ = next(iter(error.failures.values()))
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
