"""Records what a coordinator trains on, and can fix the order of refills; the code under test stays as it is.

On PYTHONPATH, Python imports this module before any other, in every process; it does something in a
coordinator alone. All that depends on the code under test is in the table below: adapt it to moved modules.

RUN/recorded/step-000001.npz holds, per sample in the order of the batch:

    ids [N] "epoch/prompt/index", offsets [N+1] into the arrays [R] of loss-masked tokens
    advantages, loss_weights, rollout_logprobs, old_logprobs, ref_logprobs [R] float32, of the actor's batches
    ROLE.values, ROLE.returns [R] float32, of each critic's batches
    minibatch [R] that a token is part of

REFILLS_TOGETHER=1 makes a filter's refills one request: prompts that replace filtered groups are issued only
once every group on its way is judged, so that what the engine computes together does not depend on time.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

COORDINATORS = ("services.coordinator", "atoll.coordinator")  # python -m ...

ARRAYS = ("samples", "advantages", "loss_weights", "rollout_logprobs", "old_logprobs", "ref_logprobs")

# module -> what is done to it; under each possible name of the module
RECIPE = ("services.coordinator.algorithm", "atoll.coordinator.algorithm.algorithm")  # has Algorithm.prepare
SOURCE = ("services.coordinator.source", "atoll.coordinator.rollouts.group_sources")  # has GenerateSource
COMPLETED = ("completed", "on_completed")  # its method that receives a complete group


def is_trained(batch):
    """[T] where a token has its own advantage: it is of a sample, and the policy produced it."""
    return batch.loss_weights != 0


def ids_of(groups):
    """Of the batch's samples, in its order, without the run's name."""
    return [f"{s.id.group.epoch}/{s.id.group.prompt}/{s.id.index}" for group in groups for s in group.samples]


def record(algorithm, folder):
    """Wraps Algorithm.prepare(groups, ...) -> Prepared(batches: {role: [Batch]}, ...)."""
    import numpy as np

    prepare, steps = algorithm.Algorithm.prepare, iter(range(1, sys.maxsize))

    async def recorded(self, groups, *others):
        prepared = await prepare(self, groups, *others)
        ids, of_policy = ids_of(groups), prepared.batches["actor"]
        keep = [is_trained(batch) for batch in of_policy]
        columns = {
            name: np.concatenate([getattr(b, name)[k] for b, k in zip(of_policy, keep, strict=True)])
            for name in ARRAYS
            if getattr(of_policy[0], name) is not None
        }
        for role, batches in prepared.batches.items():
            if role != "actor":
                for name in ("values", "returns"):
                    columns[f"{role}.{name}"] = np.concatenate(
                        [getattr(b, name)[k] for b, k in zip(batches, keep, strict=True)]
                    )
        samples = columns.pop("samples")
        assert (np.diff(samples) >= 0).all()
        offsets = np.searchsorted(samples, np.arange(len(ids) + 1))
        columns["minibatch"] = np.repeat(np.arange(len(keep)), [k.sum() for k in keep])
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{next(steps):06d}.npz"
        np.savez(path, ids=np.array(ids), offsets=offsets, **columns)
        return prepared

    algorithm.Algorithm.prepare = recorded


def refill_together(source):
    """Wraps GenerateSource.admit and .on_completed, by its groups on their way (`_pending`)."""
    cls = source.GenerateSource
    name = next(name for name in COMPLETED if hasattr(cls, name))
    admit, completed = cls.admit, getattr(cls, name)

    async def admit_together(self):
        if not self._pending:
            await admit(self)

    async def completed_then_admit(self, group):
        await completed(self, group)
        await self.admit()

    cls.admit = admit_together
    setattr(cls, name, completed_then_admit)


class _After(importlib.abc.MetaPathFinder):
    """Calls a function with each module of a table once it is loaded."""

    def __init__(self, table):
        self._table = dict(table)

    def find_spec(self, name, path=None, target=None):
        if name not in self._table:
            return None
        change = self._table.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)
            print(f"recorder: {change.__name__} in {module.__file__}", file=sys.stderr, flush=True)

        spec.loader.exec_module = exec_module
        return spec


if any(name in sys.orig_argv for name in COORDINATORS) and "--config" in sys.orig_argv:
    _folder = Path(sys.orig_argv[sys.orig_argv.index("--config") + 1]).parent / "recorded"

    def record_steps(module):
        record(module, _folder)

    _table = [(name, record_steps) for name in RECIPE]
    if os.environ.get("REFILLS_TOGETHER") == "1":
        _table += [(name, refill_together) for name in SOURCE]
    sys.meta_path.insert(0, _After(_table))
