"""Runs a program for each session, in a workspace of its own, that finds the policy in its environment."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Final, ParamSpec, TypeVar

from atoll.agents import supervisor, workspace
from atoll.agents.runner import AgentFunction
from atoll.agents.session import AgentSession
from atoll.config.errors import ConfigError
from atoll.config.load import plain_environment
from atoll.config.schema import CommandConfig

_log = logging.getLogger(__name__)

TASK: Final = "{task}"  # in the command
QUOTED: Final = 300  # characters of its last output, in the error of a program that failed
PIPE_BYTES: Final = 1 << 20  # read at once: more than a pipe holds

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CommandFailedError(Exception):
    """The program ended with another exit code than 0, or with a signal."""


def command_agent(settings: CommandConfig) -> AgentFunction:
    """The function that runs the program: exit code 0 is a session without a reward of its own, any other
    raises CommandFailedError.

    Raises ConfigError if this machine does not have the program or the workspace.
    """
    inherited = plain_environment() | settings.env
    _check(settings, inherited)

    async def run(session: AgentSession) -> None:
        directory = TemporaryDirectory(prefix="atoll-session-", ignore_cleanup_errors=True)
        folder = Path(directory.name)
        try:
            task, files = _task(session), _files(session)
            await _in_thread(workspace.lay_out, folder, settings.workspace, files, task)
            try:
                await _run_program(settings, folder, session, task, _variables(session, folder) | inherited)
            finally:
                session.environment |= await _in_thread(workspace.collect, folder, settings.files)
        finally:
            await _in_thread(directory.cleanup)

    return run


def _check(settings: CommandConfig, environment: Mapping[str, str]) -> None:
    program = settings.command[0]
    if os.sep not in program and shutil.which(program, path=environment.get("PATH")) is None:
        raise ConfigError(
            f"agents.command: there is no program {program!r} in PATH: install it, or give its absolute path"
        )
    for pattern in map(PurePath, settings.files):
        if pattern.is_absolute() or ".." in pattern.parts:
            raise ConfigError(f"agents.command.files: got '{pattern}', expected a path inside the workspace")
    if settings.workspace is not None and not settings.workspace.is_dir():
        raise ConfigError(f"agents.command.workspace = {str(settings.workspace)!r}: expected a folder")


def _task(session: AgentSession) -> str:
    for message in reversed(session.messages):
        if message["role"] == "user":
            return str(message["content"])
    raise ValueError("the row has no user message: a command gets the last one as its task")


def _files(session: AgentSession) -> dict[str, str]:
    files = json.loads(session.extra.get("files", "{}"))
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"extra_info.files: got {files!r:.100}, expected a JSON object of path to text")
    return files


def _variables(session: AgentSession, folder: Path) -> dict[str, str]:
    """As the well-known clients name them. Their state stays in the session's folder."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": session.anthropic_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_MODEL": session.model,
        "HOME": str(folder / workspace.HOME),
        "TMPDIR": str(folder / workspace.TEMPORARY),
        "ATOLL_SESSION": session.id,
        "ATOLL_TASK_FILE": str(folder / workspace.TASK),
    }


async def _run_program(
    settings: CommandConfig, folder: Path, session: AgentSession, task: str, environment: dict[str, str]
) -> None:
    """Once it returns or raises, nothing that the program started is left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        process = _start(settings, folder, task, environment, theirs)
        theirs.close()
        assert process.stdout is not None
        output = _Output(process.stdout.fileno(), settings.output_kb << 10)
        try:
            exit_code = await _report(ours)
        except asyncio.CancelledError:
            with suppress(BrokenPipeError):  # it has just ended
                ours.send(b"!")
            await _report(ours)
            _log.info("session %s: ended; its command's last output: %s", session.id, output.end()[-QUOTED:])
            raise
        finally:
            text = output.end()
            process.stdout.close()
            process.wait()
    if exit_code != 0:
        _log.warning("session %s: the end of its command's output:\n%s", session.id, text)
        raise CommandFailedError(f"{_ending(exit_code)}; its last output: {text[-QUOTED:].strip()}")


def _start(
    settings: CommandConfig, folder: Path, task: str, environment: dict[str, str], control: socket.socket
) -> subprocess.Popen[bytes]:
    """The program's supervisor, which ends when it has nothing left to end."""
    takes_task = any(TASK in argument for argument in settings.command)
    stdin = os.devnull if takes_task else str(folder / workspace.TASK)
    limits = (settings.memory_mb << 20, settings.cpu_s, settings.file_mb << 20)
    command = (argument.replace(TASK, task) for argument in settings.command)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__, str(folder), stdin, *map(str, limits), *command],
        stdin=control.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder / workspace.WORKSPACE,
        env=environment,
        start_new_session=True,  # a signal to the service's group is not meant for it
    )


async def _report(control: socket.socket) -> int | None:
    """The program's exit code, once its supervisor has ended; None: it ended without a report."""
    report = b""
    with suppress(ConnectionResetError):  # it ended without reading all that it was sent
        while received := await asyncio.get_running_loop().sock_recv(control, PIPE_BYTES):
            report += received
    return int(report) if report else None


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "the command's supervisor was killed"
    if exit_code < 0:
        return f"the command was ended by {signal.Signals(-exit_code).name}"
    return f"the command ended with exit code {exit_code}"


class _Output:
    """The last of what a program wrote, read as it comes: a full pipe would hold the program up."""

    def __init__(self, descriptor: int, limit: int) -> None:
        """`limit` is in bytes."""
        os.set_blocking(descriptor, False)
        self._descriptor, self._limit = descriptor, limit
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def end(self) -> str:
        """With what is left in the pipe."""
        self._read()
        self._loop.remove_reader(self._descriptor)
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, PIPE_BYTES)
        except BlockingIOError:
            return
        self._kept += chunk
        del self._kept[: -self._limit]
        if not chunk:
            self._loop.remove_reader(self._descriptor)


async def _in_thread(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **settings: Arguments.kwargs
) -> Result:
    """A cancellation waits for it, so that nothing is written to a folder that is being removed."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **settings))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise
