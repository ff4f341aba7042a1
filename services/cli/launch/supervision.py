"""Keeps the services of a run as its operators want them: drained ones stay away, replicas are scaled."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.cli.launch.processes import Fleet, ServiceGroup
from atoll.coordinator.background import first_cause
from atoll.coordinator.control import RunState
from atoll.runtime.clients.coordinator import CoordinatorClient, statuses
from atoll.runtime.errors import AtollError

ENDED = (RunState.FINISHED.value, RunState.FAILED.value)


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The replicas of a run that its launcher starts, numbered from 0."""

    first: Sequence[ServiceGroup]  # as the config says
    make: Callable[[int], ServiceGroup]  # the one with a number
    drain_grace_s: float


async def keep_service(fleet: Fleet, client: CoordinatorClient, group: ServiceGroup) -> None:
    """As `Fleet.keep`, but does not return: the run continues without a service that operators drain."""
    await fleet.keep(group, partial(is_wanted, client))
    await asyncio.Event().wait()


async def keep_replicas(fleet: Fleet, client: CoordinatorClient, replicas: ReplicaGroups) -> None:
    """Keeps the first replicas, later as many as `atoll scale` asks for.

    Consumes the run's status; waits for its next change, and for the loss of a replica, which it raises as
    `Fleet.keep` does. Those that are too many drain before others start.
    """
    kept: dict[str, asyncio.Task[None]] = {}
    try:
        async with asyncio.TaskGroup() as tasks:

            def keep(group: ServiceGroup) -> None:
                [name] = group.names
                if name not in kept or kept[name].done():
                    kept[name] = tasks.create_task(fleet.keep(group, partial(is_wanted, client)))

            for group in replicas.first:
                keep(group)
            async for status in statuses(client):
                if status.state in ENDED:
                    break  # the coordinator would wait for the end of another call
                if not status.replicas:
                    continue
                wanted = {f"rollout-{index}": index for index in range(status.replicas)}
                surplus = [name for name in kept if name not in wanted]
                for name in surplus:
                    kept.pop(name).cancel()
                if surplus:
                    await fleet.drain(*surplus, grace_s=replicas.drain_grace_s)
                for name in wanted.keys() - set(status.drained):
                    keep(replicas.make(wanted[name]))
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None


async def is_wanted(client: CoordinatorClient, name: str) -> bool:
    """Whether a service that has left is to start again: the run continues, and no operator drained it."""
    try:
        status = await client.status()
    except AtollError:  # the coordinator has ended, and the run with it
        return False
    return name not in status.drained and status.state not in ENDED


async def first_of(*coroutines: Coroutine[None, None, None]) -> None:
    """Returns or raises like the first one to finish, and cancels the others.

    If several end at the same time, the leftmost wins: causes are listed before their effects.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
