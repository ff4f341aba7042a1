"""One run on this machine: which processes it has, and their life from start to end."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from atoll.cli import tokens
from atoll.cli.processes import Fleet, Service, ServiceGroup
from atoll.cli.tokens import Tokens
from atoll.config.load import write_private, write_resolved
from atoll.config.schema import Role, RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.runtime.store import embedded

_log = logging.getLogger(__name__)

ADDRESS_FILE = "coordinator.address"  # in the run's folder for as long as the run goes on
STOP_RETRY_S = 1.0  # before a coordinator that did not answer is asked again to stop

Follow = Callable[[CoordinatorClient], Coroutine[None, None, None]]


def launch(config: RunConfig, follow: Follow, *, resume: bool) -> bool:
    """Runs to the end, in config.folder. Returns False where the user stopped it before.

    `follow` shows progress; it is cancelled at the end. The first Ctrl-C (or SIGTERM) stops the run
    after the step in progress, the second at once. Raises UserError where the folder belongs to
    another run, ServiceDiedError where a service is lost for good; all others are down by then.
    """
    check_interpreter(config.rollout.python)
    given = Tokens.of_this_run()
    claim_folder(config.folder, resume=resume)
    with store_url(config) as url:  # which no second launcher of this run gets
        write_resolved(config, config.folder / "config.json")
        coordinator = coordinator_of(config, url, resume=resume)
        services = partial(services_of, config)
        try:
            return asyncio.run(
                supervise(
                    config.folder,
                    given,
                    coordinator,
                    services,
                    follow,
                    start_timeout_s=config.coordinator.start_timeout_s,
                )
            )
        except asyncio.CancelledError:  # by the second interrupt
            return False


async def supervise(
    folder: Path,
    given: Tokens,
    coordinator: ServiceGroup,
    services: Callable[[str], list[ServiceGroup]],
    follow: Follow,
    *,
    start_timeout_s: float | None = None,
) -> bool:
    """Starts the coordinator, then the services that want its address, until the coordinator ends.

    Waits for the first of: the coordinator's end, the loss of a service, a second interrupt.
    """
    stop = asyncio.Event()
    with interrupts(stop):
        async with Fleet(folder / "logs", given.environment, start_timeout_s=start_timeout_s) as fleet:
            address = await fleet.start(coordinator)
            with address_file(folder, address, given):
                client = CoordinatorClient(address, Caller(token=given.run))
                try:
                    await first_of(
                        *(fleet.keep(group) for group in services(address)),
                        fleet.finished(*coordinator.names),
                        stop_run(stop, client),
                        follow(client),
                    )
                finally:
                    await client.close()
    return not stop.is_set()


def coordinator_of(config: RunConfig, store: str, *, resume: bool) -> ServiceGroup:
    command = _command("coordinator", config, "--store", store, *(["--resume"] if resume else []))
    return ServiceGroup((Service("coordinator", command, {"OMP_NUM_THREADS": "1"}),))


def services_of(config: RunConfig, coordinator: str) -> list[ServiceGroup]:
    """What the run's mode needs beside its coordinator."""
    registered = ("--coordinator", coordinator)
    models = [
        ranks_of(config, role, *registered)
        for role in config.roles
        if not (role == "reference" and config.reference.placement == "colocated")
    ]
    replicas = [
        Service(
            f"rollout-{index}",
            _command("rollout", config, "--name", f"rollout-{index}", *registered),
            computing(config.rollout.threads),
        )
        for index in range(config.rollout.replicas)
    ]
    rollout = [ServiceGroup((replica,), config.rollout.max_restarts) for replica in replicas]
    graders = [
        Service(
            f"reward-{index}",
            _command("reward", config, "--name", f"reward-{index}", *registered),
            {"OMP_NUM_THREADS": "1"},
        )
        for index in range(config.reward.services if config.reward.has_service else 0)
    ]
    reward = [ServiceGroup((grader,), config.reward.max_restarts) for grader in graders]
    match config.run.mode:
        case "train":
            return [*reward, *models, *rollout]
        case "rollout_only":
            return [*reward, *rollout]
        case "train_only" | "supervised":
            return models


def computing(threads: int) -> dict[str, str]:
    """The environment of a process that computes with torch.

    glibc gives freed blocks back to the kernel, which zeroes each page again when the next step asks for
    it. Here blocks of up to 32 MiB (glibc's limit) stay, and 256 MiB at the heap's end.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }


def ranks_of(config: RunConfig, role: Role, *arguments: str) -> ServiceGroup:
    """One process a rank; the first one serves for all of them, the others announce no address."""
    section = config.roles[role]
    world_size = section.parallel.world_size
    environment = {"WORLD_SIZE": str(world_size), **computing(section.threads)}
    ranks = tuple(
        Service(
            f"{role}-{rank}",
            _command("trainer", config, "--role", role, "--name", f"{role}-{rank}", *arguments),
            {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    )
    return ServiceGroup(ranks, section.max_restarts)


def check_interpreter(python: Path | None) -> None:
    if python is not None and not os.access(python, os.X_OK):
        raise UserError(
            f"rollout.python = {python} is no program: name the interpreter of the replicas' environment, "
            "such as .venv-rollout/bin/python, seen from the folder that the command runs in"
        )


def claim_folder(folder: Path, *, resume: bool) -> None:
    """A folder belongs to the run that recorded a step in it; a start that failed before leaves it free."""
    rows = folder / "metrics.jsonl"
    taken = rows.exists() and rows.stat().st_size > 0
    if taken and not resume:
        raise UserError(
            f"{folder} holds a run already: go on with it (--resume), "
            f"name this one otherwise (--set run.name=NAME), or delete the folder"
        )
    if resume and not taken:
        raise UserError(f"--resume: {folder} holds no run; start it without --resume")
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def store_url(config: RunConfig) -> Iterator[str]:
    if config.store.url == "embedded":
        with embedded(config.folder / "store") as server:
            yield server.url
    else:
        yield config.store.url


@contextmanager
def address_file(folder: Path, address: str, given: Tokens) -> Iterator[None]:
    """Lets `atoll status` find the coordinator and its token, until a later launcher takes the run over."""
    path = folder / ADDRESS_FILE
    given.write(folder)
    write_private(path, address)
    try:
        yield
    finally:
        if path.exists() and path.read_text() == address:
            path.unlink()
            tokens.remove(folder)


@contextmanager
def interrupts(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT or SIGTERM sets `stop`; a second one cancels the calling task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def stop_run(stop: asyncio.Event, client: CoordinatorClient) -> None:
    """Hands the user's wish to the coordinator, whose exit ends the run, and shows what that waits for: a
    step and a checkpoint take as long as they take. Returns if there is nothing to finish."""
    await stop.wait()
    seen, shown, is_told = 0, "", False
    while True:
        try:
            status = await client.status(seen)
            if status.state in ("starting", "recovering"):
                return
            if not is_told:
                await client.stop_run()
                is_told = True
        except ServiceUnavailableError as error:  # it is busy, or ending already
            waits_for = f"an answer of the coordinator ({error})"
            await asyncio.sleep(STOP_RETRY_S)
        else:
            seen = status.revision
            waits_for = f"the run, which is {status.state} after step {status.step} of {status.num_steps}"
        if waits_for != shown:
            _log.warning("stopping: waits for %s; interrupt again to stop at once", waits_for)
            shown = waits_for


async def first_of(*coroutines: Coroutine[None, None, None]) -> None:
    """Returns or raises as the first of them does, and cancels the others.

    Of those that end at the same moment the leftmost counts: a cause stands left of its effects.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _command(role: str, config: RunConfig, *arguments: str) -> tuple[str, ...]:
    python = config.rollout.python if role == "rollout" else None
    path = config.folder / "config.json"
    return (str(python or sys.executable), "-m", f"atoll.{role}", "--config", str(path), *arguments)
