"""Checks a run before its services start: for `atoll run`, `--dry-run` and `doctor`.

Does not load torch. Users' functions are imported in a process of their own, except those of datasets.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path

from atoll.cli.launch.findings import Finding, FindingState, loopback
from atoll.cli.launch.launcher import check_interpreter, gateway_listeners, listen
from atoll.config.errors import ConfigError
from atoll.config.load import secret
from atoll.config.placement import describe_placement, other_hosts
from atoll.config.schema import AgentConfig, LoraConfig, Role, RunConfig, TrackerName, section_name
from atoll.coordinator.journal.run_folder import check_folder
from atoll.coordinator.run_data import data_checks
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.model_spec import HEADS, check_layout, check_length, check_router_replay, read_spec
from atoll.runtime.rendering import Renderer
from atoll.runtime.store import Store
from atoll.trainer.megatron.tensor_files import ADAPTER_WEIGHTS, check_adapter, open_tensors

MAX_ROWS = 10_000  # of a dataset; the coordinator reads all
IMPORT_TIMEOUT_S = 120.0
ENGINE_PACKAGES = {"local": "torch", "sglang": "sglang"}

_FIND_PACKAGES = """
import sys
from importlib.util import find_spec
def is_found(name):  # a folder of that name alone, such as the files that wandb writes, has no origin
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
sys.exit(" ".join(name for name in sys.argv[1:] if not is_found(name)))
"""
_LOAD_FUNCTIONS = """
import sys
from atoll.config.errors import ConfigError
from atoll.config.functions import load_user_function
try:
    for name in sys.argv[2:]:
        load_user_function(name, is_async=sys.argv[1] == "async")
except ConfigError as error:
    sys.exit(str(error))
"""


def require(config: RunConfig, *, resume: bool) -> None:
    """Raises UserError with everything that would end the run's start."""
    findings = examine(config, resume=resume)
    failed = [finding for finding in findings if finding.state is FindingState.MISSING]
    if failed:
        problems = (
            f"{finding.what}: {finding.found}{finding.advice and f'; {finding.advice}'}" for finding in failed
        )
        raise UserError("\n".join(["the run cannot start:", *problems]))


def examine(config: RunConfig, *, resume: bool) -> Iterator[Finding]:
    """One finding per check, in the order in which a start would meet them. `config` is resolved."""
    yield loopback()
    yield _finding("run folder", partial(_run_folder, config, resume=resume))
    if config.placement.use_visible_gpus or describe_placement(config):
        yield _finding("placement", partial(_placement, config))
    for what, check in (*_environment_checks(config), *_model_checks(config)):
        yield _finding(what, check)
    renderer = None
    if _is_model(config.model.path):  # otherwise the actor's model was reported
        try:
            renderer = Renderer(config.model.path)
            template = "a" if renderer.has_template else "no"
            yield Finding("tokenizer", f"{config.model.path}, {template} chat template")
        except UserError as error:
            yield Finding("tokenizer", str(error), FindingState.MISSING)
    for what, read in data_checks(config, renderer, MAX_ROWS):
        yield _finding(what, partial(_count, read))


def _is_model(folder: Path) -> bool:
    try:
        read_spec(folder)
    except UserError:
        return False
    return True


def _finding(what: str, check: Callable[[], str]) -> Finding:
    try:
        with redirect_stdout(sys.stderr):  # a user's function may print; stdout is for the resolved config
            return Finding(what, check())
    except (AtollError, ConfigError) as error:
        return Finding(what, str(error), FindingState.MISSING)


def _run_folder(config: RunConfig, *, resume: bool) -> str:
    check_folder(config.folder, resume=resume)
    return str(config.folder)


def _placement(config: RunConfig) -> str:
    """Raises UserError if the name of another host is unknown, or if services find their GPUs themselves."""
    if config.placement.use_visible_gpus:
        raise UserError(
            "placement.use_visible_gpus = true is for services that are started one by one, as in "
            "containers: remove it to let `atoll run` give out the GPUs of this machine"
        )
    for host in sorted(other_hosts(config)):
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(
                f"placement.gpus names the host {host}, which is not {socket.gethostname()}, this machine, "
                f"and has no address: {error.strerror}"
            ) from None
    return describe_placement(config)


def _count(read: Callable[[], Sized]) -> str:
    return f"{len(read())} rows read"


def _environment_checks(config: RunConfig) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "coordinator.port", partial(_coordinator_port, config)
    if config.has_agents:
        yield "gateway.port", partial(_gateway_ports, config)
    if config.store.url != "embedded":
        yield "store.url", partial(_store, config)
    if config.run.mode in ("train", "rollout_only"):
        packages = ("grpc", ENGINE_PACKAGES[config.rollout.engine])
        yield "rollout.python", partial(_packages, "rollout.python", config.rollout.python, *packages)
    if config.run.mode != "rollout_only":
        yield "trainer packages", partial(_packages, "", None, "torch", "megatron.core")
    if config.tracking.to:
        yield "trackers", partial(check_trackers, config.tracking.to, config.tracking.python)
    for server in config.servers:
        if server.auth:
            yield f"servers {server.name}", partial(_secret, server.auth)
    if names := _own_functions(config):
        yield "own functions", partial(_import, sys.executable, "plain", *names)
    for agent in config.agents:
        yield f"agent {agent.name}", partial(_agent, agent)


def _coordinator_port(config: RunConfig) -> str:
    section = config.coordinator
    with listen("coordinator", "coordinator", section.host, section.port):
        return f"{section.host}:{section.port or 'any free one'}"


def _gateway_ports(config: RunConfig) -> str:
    with gateway_listeners(config) as listeners:
        return f"{len(listeners)} can be opened on {config.gateway.host}"


def _store(config: RunConfig) -> str:
    async def ping() -> None:
        store = Store(config.store.url, config.run.name)
        try:
            await store.ping()
        finally:
            await store.close()

    asyncio.run(ping())
    return "answers"


def _packages(setting: str, python: Path | None, *names: str) -> str:
    """Looks for packages without importing them, which takes many seconds."""
    check_interpreter(setting, python)
    interpreter = str(python or sys.executable)
    missing = _run(interpreter, _FIND_PACKAGES, *names)
    if missing:
        advice = f"; install it there, or set {setting}" if setting else ": see `atoll doctor`"
        raise UserError(f"{interpreter} cannot import {missing}{advice}")
    return f"{interpreter} has {', '.join(names)}"


def check_trackers(names: Sequence[TrackerName], python: Path | None) -> str:
    """Raises UserError if the package of a tracker is missing where its process runs."""
    check_interpreter("tracking.python", python)
    interpreter = str(python or sys.executable)
    if missing := _run(interpreter, _FIND_PACKAGES, "atoll", *names):
        raise UserError(
            f"{interpreter} cannot import {missing}: pip install 'atoll[{','.join(names)}]' there, or set "
            "tracking.python"
        )
    return f"{interpreter} has {', '.join(names)}"


def _secret(reference: str) -> str:
    secret(reference)
    return f"{reference} is set"


def _own_functions(config: RunConfig) -> list[str]:
    parts = config.algorithm
    named = (*config.reward.graders, parts.advantage, parts.loss, parts.filter, parts.reweight)
    return [function.name for function in named if function is not None and function.is_users_own]


def _agent(agent: AgentConfig) -> str:
    check_interpreter(f'[[agents]] "{agent.name}": python', agent.python)
    if agent.command:
        return agent.command.command[0]
    return _import(str(agent.python or sys.executable), "async", agent.function)


def _import(interpreter: str, kind: str, *names: str) -> str:
    problem = _run(interpreter, _LOAD_FUNCTIONS, kind, *names)
    if problem:
        raise UserError(problem)
    return ", ".join(names)


def _run(interpreter: str, code: str, *arguments: str) -> str:
    """What is wrong according to a program of ours: the last line that it writes to stderr; "": nothing."""
    command = [interpreter, "-c", code, *arguments]
    try:
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"importing {' '.join(arguments)} took more than {IMPORT_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{interpreter}: {error.strerror}"
    return ended.stderr.strip().rpartition("\n")[2] if ended.returncode else ""


def _model_checks(config: RunConfig) -> Iterator[tuple[str, Callable[[], str]]]:
    for role in config.roles:
        if role == "actor" or config.run.mode != "rollout_only":
            yield f"{role} model", partial(_model, config, role)
    lora = config.trainer.lora
    if lora is not None and lora.path is not None:
        yield "trainer.lora.path", partial(_adapter, lora.path, lora)


def _adapter(folder: Path, lora: LoraConfig) -> str:
    check_adapter(folder, lora)
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(f"{folder / ADAPTER_WEIGHTS}: missing; copy the adapter again")
    return str(folder)


def _model(config: RunConfig, role: Role) -> str:
    folder = config.model_folder(role)
    spec = read_spec(folder, HEADS[role])
    generates = config.run.mode in ("train", "rollout_only")
    if role == "actor" and generates and config.sequence_limit is not None:
        check_length(config.sequence_limit, spec, folder)
    if role == "actor" and config.trainer.router_replay:
        check_router_replay(spec, folder)
    check_layout(spec, config.roles[role].parallel, section_name(role))
    with ExitStack() as files:
        tensors = open_tensors(folder, spec, files, framework="numpy")
        return f"{folder}, {len(tensors)} tensors"
