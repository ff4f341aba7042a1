"""Runs all processes of a run on this machine, from start to end."""

import asyncio
import logging
import os
import resource
import shlex
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

from atoll.cli.launch import tokens
from atoll.cli.launch.interrupts import handle_interrupts, stop_run
from atoll.cli.launch.processes import Fleet, ScrapeTargets, ServiceCommand, ServiceGroup
from atoll.cli.launch.supervision import ReplicaGroups, first_of, keep_replicas, keep_service
from atoll.cli.launch.tokens import TOKEN_FILE, Tokens
from atoll.cli.launch.trackers import tracker_groups
from atoll.config.load import write_private, write_resolved
from atoll.config.placement import NO_GPU, other_hosts, replica_environment, trainer_environment
from atoll.config.schema import Role, RunConfig
from atoll.coordinator.journal.checkpoints import Checkpoints
from atoll.coordinator.journal.run_folder import check_folder
from atoll.coordinator.summary import SUMMARY_FILE, Outcome, complete_summary
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.process import BACKLOG
from atoll.runtime.store import run_embedded_server

_log = logging.getLogger(__name__)

ADDRESS_FILE = "coordinator.address"  # in the run's folder while it is running
TORCHRUN_PORT = 29500  # where the ranks of several hosts meet
MIN_OPEN_FILES = 256  # a trainer rank of a tiny model on a CPU has 106

Follow = Callable[[CoordinatorClient], Coroutine[None, None, None]]


def launch(config: RunConfig, follow: Follow, *, resume: bool, step: int | None = None) -> bool:
    """Runs to the end, in config.folder. Returns False if the user stopped it early.

    `step`: of the checkpoint to resume from; None: the newest.

    `follow` shows progress; it is cancelled at the end. The first Ctrl-C (or SIGTERM, or SIGHUP of a terminal
    that closes) stops the run after the step in progress, the second at once. Raises UserError if the folder
    belongs to another run, ServiceDiedError if a service is lost permanently; all other processes have ended
    by then.
    """
    check_open_files()
    check_interpreter("rollout.python", config.rollout.python)
    for agent in config.agents:
        check_interpreter(f'[[agents]] "{agent.name}": python', agent.python)
    given = Tokens.of_this_run()
    claim_folder(config.folder, resume=resume)
    with store_url(config) as url, gateway_listeners(config) as listeners:  # one launcher of a run holds it
        if step is not None:
            go_back(config.folder, step)
        write_resolved(config, config.folder / "config.json")
        coordinator = coordinator_group(config, url, resume=resume)
        services = partial(service_groups, config, store=url, listeners=listeners)
        (config.folder / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier start
        try:
            completed = asyncio.run(
                supervise(
                    config.folder,
                    given,
                    coordinator,
                    services,
                    follow,
                    start_timeout_s=config.coordinator.start_timeout_s,
                    replicas=partial(replicas_of, config),
                )
            )
        except asyncio.CancelledError:  # by the second interrupt
            completed = False
        except AtollError as error:
            complete_summary(config, Outcome.FAILED, str(error).partition("\n")[0])
            raise
        complete_summary(config, Outcome.INTERRUPTED)
        return completed


async def supervise(
    folder: Path,
    given: Tokens,
    coordinator: ServiceGroup,
    services: Callable[[str], list[ServiceGroup]],
    follow: Follow,
    *,
    start_timeout_s: float | None = None,
    replicas: Callable[[str], ReplicaGroups] | None = None,
) -> bool:
    """Starts the coordinator, then the services, which need its address; returns when the coordinator ends.
    `replicas`: those of `services` that can be scaled.

    Waits for the first of: the coordinator's end, the loss of a service, a second interrupt.
    """
    stop = asyncio.Event()
    with handle_interrupts(stop), ScrapeTargets(folder / "prometheus.json", folder.name) as targets:
        async with Fleet(
            folder / "logs", {**given.environment, **NO_GPU}, start_timeout_s=start_timeout_s, targets=targets
        ) as fleet:
            address = await fleet.start(coordinator)
            with publish_address(folder, address, given):
                client = CoordinatorClient(address, Caller(token=given.run))
                groups, scaled = services(address), replicas(address) if replicas else None
                for group in groups:
                    if group.elsewhere:
                        _log.warning("start %s by hand:\n%s", group.names[0], group.elsewhere)
                own = [group for group in groups if not group.elsewhere]
                fixed = [group for group in own if scaled is None or group not in scaled.first]
                try:
                    await first_of(
                        *(keep_service(fleet, client, group) for group in fixed),
                        *([keep_replicas(fleet, client, scaled)] if scaled else []),
                        fleet.wait_for_exit(*coordinator.names),
                        stop_run(stop, client),
                        follow(client),
                    )
                finally:
                    await client.close()
                    await fleet.kill(*coordinator.names)  # else services that end now would drain first
    return not stop.is_set()


def coordinator_group(config: RunConfig, store: str, *, resume: bool) -> ServiceGroup:
    command = _command("coordinator", config, "--store", store, *(["--resume"] if resume else []))
    return ServiceGroup((ServiceCommand("coordinator", command, {"OMP_NUM_THREADS": "1"}),))


def service_groups(
    config: RunConfig, coordinator: str, *, store: str = "", listeners: Sequence[socket.socket] = ()
) -> list[ServiceGroup]:
    """The services that the run's mode needs, without its coordinator. `listeners`: of gateways, which
    keep sessions in `store`.
    """
    registered = ("--coordinator", coordinator)
    models = [trainer_group(config, role, *registered) for role in config.started_roles]
    rollout = [new_replica(config, coordinator, index) for index in range(config.num_replicas)]
    graders = [
        ServiceCommand(
            f"reward-{index}",
            _command("reward", config, "--name", f"reward-{index}", *registered),
            {"OMP_NUM_THREADS": "1"},
        )
        for index in range(config.reward.services if config.has_reward_service else 0)
    ]
    reward = [ServiceGroup((grader,), config.reward.max_restarts) for grader in graders]
    sessions = [*gateway_groups(config, store, listeners, *registered), *agent_groups(config, *registered)]
    trackers = tracker_groups(config, coordinator)
    if config.run.mode in ("train_only", "supervised"):
        return [*models, *trackers]
    return [*reward, *models, *rollout, *sessions, *trackers]


def replicas_of(config: RunConfig, coordinator: str) -> ReplicaGroups:
    """The replicas of this host, at the coordinator's address."""
    make = partial(new_replica, config, coordinator)
    first = [group for group in map(make, range(config.num_replicas)) if not group.elsewhere]
    return ReplicaGroups(first, make, config.coordinator.drain_grace_s)


def new_replica(config: RunConfig, coordinator: str, index: int) -> ServiceGroup:
    # a replica measures the free memory of its GPUs when it starts: by then, trainers have theirs off-loaded
    models = [trainer_group(config, role) for role in config.started_roles]
    first = [group.names[0] for group in models if not group.elsewhere]
    after = tuple(first) if config.placement.mode == "colocated" else ()
    return replica_group(config, index, after, "--coordinator", coordinator)


def service_names(config: RunConfig) -> list[str]:
    """The names of the services that a run waits for, as they register: of a trainer, its first rank's."""
    gateways = range(config.gateway.instances if config.has_agents else 0)
    groups = [group for group in service_groups(config, coordinator="") if not group.if_lost]
    return [*(group.names[0] for group in groups), *(f"gateway-{index}" for index in gateways)]


def gateway_groups(
    config: RunConfig, store: str, listeners: Sequence[socket.socket], *arguments: str
) -> list[ServiceGroup]:
    """A gateway for each listener."""
    gateways = [
        ServiceCommand(
            f"gateway-{index}",
            _command("gateway", config, "--name", f"gateway-{index}", "--store", store, *arguments),
            {"OMP_NUM_THREADS": "1"},
            listener,
        )
        for index, listener in enumerate(listeners)
    ]
    return [ServiceGroup((gateway,), config.gateway.max_restarts) for gateway in gateways]


def agent_groups(config: RunConfig, *arguments: str) -> list[ServiceGroup]:
    """The processes of all agents, numbered through."""
    hosted = [agent for agent in config.agents for _ in range(agent.processes)]
    return [
        ServiceGroup(
            (
                ServiceCommand(
                    f"agents-{index}",
                    _command(
                        "agents",
                        config,
                        *("--name", f"agents-{index}", "--agent", agent.name, *arguments),
                        python=agent.python,
                    ),
                    {"OMP_NUM_THREADS": "1"},
                ),
            ),
            agent.max_restarts,
        )
        for index, agent in enumerate(hosted)
    ]


@contextmanager
def gateway_listeners(config: RunConfig) -> Iterator[list[socket.socket]]:
    """The listening sockets of the run's gateways, which outlive each process that serves on them.

    Raises UserError if a port is taken.
    """
    section = config.gateway
    with ExitStack() as opened:
        listeners = []
        for index in range(section.instances if config.has_agents else 0):
            port = section.port + index if section.port else 0
            listener = listen(f"gateway-{index}", "gateway", section.host, port)
            listeners.append(opened.enter_context(listener))
        yield listeners


def listen(service: str, table: str, host: str, port: int) -> socket.socket:
    """Raises UserError that names the settings in `table` if the address cannot be had."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"{service} cannot listen on {host}:{port}: {error.strerror}; set {table}.host to an address of "
            f"this machine, and {table}.port to a free port or 0 for any"
        ) from None


def compute_environment(threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with torch.

    By default glibc returns freed blocks to the kernel, which zeroes each page again at the next step. These
    settings keep blocks of up to 32 MiB (glibc's limit), and 256 MiB at the heap's end.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }


def trainer_group(config: RunConfig, role: Role, *arguments: str) -> ServiceGroup:
    """One process per rank; only the first one serves and announces an address."""
    section = config.roles[role]
    world_size = section.parallel.world_size
    gpus = config.placement.gpus.roles.get(role, ())
    environment = {"WORLD_SIZE": str(world_size), **compute_environment(section.threads)}
    ranks = tuple(
        ServiceCommand(
            f"{role}-{rank}",
            _command(
                "trainer",
                config,
                *("--role", role, "--name", f"{role}-{rank}", *arguments, *_reachable(config)),
            ),
            {
                **environment,
                **trainer_environment(config, role, rank),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(world_size)
    )
    elsewhere = _torchrun_commands(config, role, *arguments) if any(gpu.host for gpu in gpus) else ""
    return ServiceGroup(ranks, section.max_restarts, elsewhere=elsewhere)


def replica_group(config: RunConfig, index: int, after: tuple[str, ...], *arguments: str) -> ServiceGroup:
    name, rollout = f"rollout-{index}", config.rollout
    host = config.placement.gpus.replicas[index][0].host if rollout.device == "cuda" else ""
    arguments = ("--name", name, *arguments, *_reachable(config, host))
    command = _command("rollout", config, *arguments, python=rollout.python)
    environment = {**compute_environment(rollout.threads), **replica_environment(config, name)}
    elsewhere = f"  on {host}: {_by_hand(config, *command)}" if host else ""
    return ServiceGroup(
        (ServiceCommand(name, command, environment),), rollout.max_restarts, after=after, elsewhere=elsewhere
    )


def check_interpreter(setting: str, python: Path | None) -> None:
    if python is not None and not os.access(python, os.X_OK):
        raise UserError(
            f"{setting} = {python} is not an executable: set it to the Python interpreter of the processes' "
            "environment, such as .venv-rollout/bin/python, relative to the current folder"
        )


def check_open_files() -> None:
    """Children inherit the limit. Raises UserError if it is too low for a service to start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        raise UserError(
            f"this shell's limit of open files is {limit}, expected at least {MIN_OPEN_FILES}: raise it with "
            "`ulimit -n 4096`"
        )


def claim_folder(folder: Path, *, resume: bool) -> None:
    """Creates the run's folder. Raises UserError as check_folder does."""
    check_folder(folder, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)


def go_back(folder: Path, step: int) -> None:
    """Leaves later checkpoints than that of `step` behind; the coordinator does so with rows and dumps."""
    for left in Checkpoints(folder / "checkpoints", keep=1).leave_after(step):
        _log.warning("a later checkpoint is left as %s; delete it if you do not need it", left)


@contextmanager
def store_url(config: RunConfig) -> Iterator[str]:
    if config.store.url == "embedded":
        with run_embedded_server(config.folder / "store") as server:
            yield server.url
    else:
        yield config.store.url


@contextmanager
def publish_address(folder: Path, address: str, given: Tokens) -> Iterator[None]:
    """Publishes the coordinator's address and token for `atoll status`, until a later launcher takes over."""
    path = folder / ADDRESS_FILE
    given.write(folder)
    write_private(path, address)
    try:
        yield
    finally:
        if path.exists() and path.read_text() == address:
            path.unlink()
            tokens.remove(folder)


def _torchrun_commands(config: RunConfig, role: Role, *arguments: str) -> str:
    """One line per host of the role, for its user: the ranks of several hosts meet by torchrun."""
    gpus = config.placement.gpus.roles[role]
    hosts = {host: len(list(ranks)) for host, ranks in groupby(gpus, key=lambda gpu: gpu.host)}
    meeting = (next(iter(hosts)) or config.coordinator.host, str(TORCHRUN_PORT))
    lines = []
    for number, (host, count) in enumerate(hosts.items()):
        ranks = ("--nnodes", str(len(hosts)), "--node-rank", str(number), "--nproc-per-node", str(count))
        _, *module = _command("trainer", config, "--role", role, *arguments, *_reachable(config, host))
        command = ("torchrun", *ranks, "--master-addr", meeting[0], "--master-port", meeting[1], *module)
        lines.append(f"  on {host or 'this machine'}: {_by_hand(config, *command)}")
    return "\n".join(lines)


def _reachable(config: RunConfig, host: str = "") -> tuple[str, ...]:
    """Where a service on `host` listens; by default on loopback."""
    return ("--host", host or config.coordinator.host) if other_hosts(config) else ()


def _by_hand(config: RunConfig, *command: str) -> str:
    """A shell command for a host that shares this folder."""
    return f"ATOLL_TOKEN=$(cat {config.folder / TOKEN_FILE}) {shlex.join(command)}"


def _command(role: str, config: RunConfig, *arguments: str, python: Path | None = None) -> tuple[str, ...]:
    path = config.folder / "config.json"
    return (str(python or sys.executable), "-m", f"atoll.{role}", "--config", str(path), *arguments)
