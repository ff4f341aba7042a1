"""Saves and restores a learner in Megatron's distributed format, which any parallel layout can load.

A folder appears under its name only when it is complete and on disk. Nothing in the trainer draws random
numbers, so weights, optimizer state and the number of updates are all that an exact resume needs.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as megatron_format
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from services.runtime.errors import CheckpointError, UserError
from services.trainer.step import Learner


class _SaveInProcess(megatron_format.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by this process.

    Megatron's own writer forks, which a process that serves gRPC must not, and leaves a helper behind.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        tensors, _, _ = megatron_format._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state_dict(
            megatron_format.mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=megatron_format.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


def save(learner: Learner, path: Path) -> int:
    """Writes the folder `path`, in place of one of that name; every rank calls it. Returns its bytes.

    Raises CheckpointError on every rank where it cannot be written, as on a full disk; `path` is then
    as before.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        return _write(learner, partial, path)
    except CheckpointException as error:  # every rank gets it
        raise _not_written(partial, path, error) from error
    except (OSError, RuntimeError) as error:
        if dist.get_world_size() > 1:
            raise  # the other ranks wait for this one: only its end frees them
        raise _not_written(partial, path, error) from error


def load(learner: Learner, path: Path) -> None:
    """Restores what `save` wrote, on any layout; every rank calls it. Raises UserError where it cannot."""
    if not (path / "metadata.json").exists():
        raise UserError(f"{path} is no checkpoint of a trainer: it has no metadata.json")
    common, head = dist_checkpointing.load_common_state_dict(str(path)), learner.model.spec.head
    num_updates = common["num_updates"]
    if common["head"] != head:  # Megatron would cut an output layer to the size of a value head
        raise UserError(
            f"{path} is of a model with a {common['head']} head, expected a {head} head: "
            "load the checkpoint of this model's own role"
        )
    try:
        state = dist_checkpointing.load(_state(learner, num_updates, is_loading=True), str(path))
    except (CheckpointingException, CheckpointException) as error:
        raise UserError(
            f"{path} does not fit this model: {error}; resume with the model it was made of"
        ) from error
    learner.model.network.load_state_dict(state["model"])
    if num_updates:
        learner.optimizer.load_state_dict(state["optimizer"])
    else:
        learner.optimizer.optimizer.state.clear()
    learner.num_updates = num_updates
    learner.reset()


def _state(learner: Learner, num_updates: int, is_loading: bool) -> dict[str, Any]:
    """What Megatron saves or loads; the optimizer has no state before the first update."""
    model = learner.model.network.sharded_state_dict()
    state = {"model": model, "num_updates": num_updates, "head": learner.model.spec.head}
    if num_updates:
        state["optimizer"] = learner.optimizer.sharded_state_dict(model, is_loading=is_loading)
    return state


def _write(learner: Learner, partial: Path, path: Path) -> int:
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        _state(learner, learner.num_updates, is_loading=False),
        str(partial),
        sharded_strategy=_SaveInProcess("torch_dist", 1),
    )
    num_bytes = sum(file.stat().st_size for file in partial.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        _put_in_place(partial, path)
    dist.barrier()
    return num_bytes


def _not_written(partial: Path, path: Path, error: BaseException) -> CheckpointError:
    cause = str(error).strip().splitlines()[-1]
    free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return CheckpointError(
        f"checkpoint {path} was not written: {cause} ({free:,} bytes are free on its disk); those before it "
        "are untouched. Free some space or mend the path, then save again"
    )


def _put_in_place(partial: Path, path: Path) -> None:
    for file in [*partial.iterdir(), partial]:
        _fsync(file)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
