"""The process that runs the graders: code that hangs or crashes can be ended there, and only there.

Both ends of its pipe are in this file. A message is a serialized ScoreRequest one way, a serialized
ScoreReply the other; before the first, the process says what kept it from loading, or nothing.
"""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from services.config.errors import ConfigError
from services.config.schema import GraderConfig
from services.reward.score import WeightedGrader, load_graders
from services.runtime.errors import UserError
from services.runtime.tether import die_with_parent

STOP_TIMEOUT_S = 5.0

Answer = Callable[[bytes, Sequence[WeightedGrader]], bytes]


class GradingStoppedError(Exception):
    """The process hung or died over a request; a new one is ready."""


class GradingProcess:
    """Answers one request at a time; for one calling thread."""

    def __init__(self, graders: Sequence[GraderConfig], answer: Answer) -> None:
        """Starts it; there it calls `answer`. Raises UserError where the graders cannot be loaded."""
        self._graders = tuple(graders)
        self._answer = answer
        self._start()

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        """Raises GradingStoppedError with the cause where no answer comes within `timeout_s`."""
        try:
            self._connection.send_bytes(request)
            if self._connection.poll(timeout_s):
                return self._connection.recv_bytes()
            cause = f"no verdict within {timeout_s:g} s (reward.timeout_s)"
        except (EOFError, ConnectionError):
            self._process.join(STOP_TIMEOUT_S)
            cause = (
                f"the grading process died ({_ending(self._process.exitcode)}); see the reward service's log"
            )
        self.close()
        self._start()
        raise GradingStoppedError(cause)

    def kill(self) -> None:
        """From any thread: ends what it grades now."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.join(STOP_TIMEOUT_S)
        self._connection.close()

    def _start(self) -> None:
        # spawned, not forked: gRPC's threads must not be copied into it
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._graders, self._answer), name="graders", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        try:
            problem = self._connection.recv_bytes().decode()
        except EOFError:
            self._process.join(STOP_TIMEOUT_S)
            problem = (
                f"reward.graders: the process died while loading them ({_ending(self._process.exitcode)})"
            )
        if problem:
            self.close()
            raise UserError(problem)


def _serve(connection: Connection, configs: Sequence[GraderConfig], answer: Answer) -> None:
    """The other end: waits for a request, answers it; ends when the service closes the pipe or dies."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the service drains its calls first, then ends this process
    try:
        graders = load_graders(configs)
    except ConfigError as error:
        connection.send_bytes(str(error).encode())
        return
    connection.send_bytes(b"")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(request, graders))


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "still running"
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
