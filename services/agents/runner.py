"""Runs agent functions as tasks of an event loop separate from the service's."""

import asyncio
import faulthandler
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from numbers import Real
from threading import Thread
from typing import Final

from atoll.agents.session import AgentSession, EnvironmentFailedError
from atoll.runtime.errors import UserError
from atoll.wire.types import AgentOutcome, AgentTask, SessionId

_log = logging.getLogger(__name__)

REMEMBERED_S: Final = 600.0  # after the last listener left: outcomes are kept, functions may run
CANCEL_GRACE_S: Final = 5.0  # for a function to end once it is cancelled
BLOCKED_S: Final = 120.0  # that a function may block the loop of all
JOIN_TIMEOUT_S: Final = 1.0  # for the loop to stop
MAX_CAUSE: Final = 500  # characters
CANCELLED: Final = AgentOutcome("cancelled")
LOST: Final = AgentOutcome("the process that ran the agent exited")

AgentFunction = Callable[[AgentSession], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class HostedAgent:
    function: AgentFunction
    concurrency: int  # concurrent sessions that the coordinator may start


class _AgentCall:
    """`call` belongs to the loop of the functions, all else to the service's."""

    def __init__(self, id: SessionId) -> None:
        self.id = id
        self.outcome = asyncio.get_running_loop().create_future()
        self.call: asyncio.Task[AgentOutcome] | None = None  # None: not begun
        self.is_cancelled = False
        self.num_listeners = 0

    def settle(self, outcome: AgentOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class AgentRunner:
    """Holds sessions. Functions share an event loop in a thread of its own: one that blocks it holds up the
    other sessions of this process, and not the service.
    """

    def __init__(self, agents: Mapping[str, HostedAgent]) -> None:
        """Call it in the service's loop."""
        self._agents = agents
        self._sessions: dict[SessionId, _AgentCall] = {}
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        num_threads = sum(agent.concurrency for agent in agents.values())  # so that no to_thread has to wait
        self._loop.set_default_executor(ThreadPoolExecutor(num_threads, "agent"))
        self._thread = Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    def end_process_if_blocked(self, after_s: float = BLOCKED_S) -> None:
        """From now on the process exits, with the stack of every thread in its log, once a function has kept
        the loop, or the interpreter's lock, for `after_s` seconds: nothing else ends such a function."""

        def arm() -> None:
            faulthandler.dump_traceback_later(after_s, exit=True)
            self._loop.call_later(after_s / 4, arm)

        self._loop.call_soon_threadsafe(arm)

    @property
    def num_running(self) -> int:
        return sum(not session.outcome.done() for session in self._sessions.values())

    async def run(self, task: AgentTask) -> AgentOutcome:
        """How the task's function ended; a repeated call joins it, or gets the outcome that is remembered.

        How many run at once is up to the coordinator. Raises UserError for an unknown agent.
        """
        session = self._sessions.get(task.session) or self._begin(task)
        session.num_listeners += 1
        try:
            return await asyncio.shield(session.outcome)
        finally:
            session.num_listeners -= 1
            self._home.call_later(REMEMBERED_S, self._forget, session)

    def cancel(self, id: SessionId) -> None:
        """The function gets CancelledError; `run` returns within CANCEL_GRACE_S even if it keeps running."""
        session = self._sessions.get(id)
        if session is None or session.is_cancelled or session.outcome.done():
            return
        session.is_cancelled = True

        def cancel_call() -> None:
            assert session.call is not None  # begun by an earlier callback
            session.call.cancel()

        def give_up() -> None:
            if not session.outcome.done():
                _log.warning("session %s: its function is still running after it was cancelled", id)
                session.settle(CANCELLED)

        self._loop.call_soon_threadsafe(cancel_call)
        self._home.call_later(CANCEL_GRACE_S, give_up)

    async def close(self) -> None:
        """Cancels running functions. One that keeps running ends with the process."""
        for id in list(self._sessions):
            self.cancel(id)
        await asyncio.gather(*(session.outcome for session in self._sessions.values()))
        faulthandler.cancel_dump_traceback_later()
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _begin(self, task: AgentTask) -> _AgentCall:
        agent = self._agents.get(task.agent)
        if agent is None:
            known = ", ".join(self._agents)
            raise UserError(f"got a session for agent {task.agent!r}, this process runs {known}")
        session = self._sessions[task.session] = _AgentCall(task.session)
        if not task.agent_key:
            session.settle(LOST)
            return session

        def begin() -> None:
            session.call = self._loop.create_task(self._call(agent.function, task))
            session.call.add_done_callback(end)

        def end(call: asyncio.Task[AgentOutcome]) -> None:
            outcome = CANCELLED if call.cancelled() else call.result()
            self._home.call_soon_threadsafe(session.settle, outcome)

        self._loop.call_soon_threadsafe(begin)
        return session

    async def _call(self, function: AgentFunction, task: AgentTask) -> AgentOutcome:
        """Runs in the other loop."""
        async with aclosing(AgentSession(task)) as session:
            try:
                reward = _reward(await function(session))
            except GeneratorExit:
                raise
            except asyncio.CancelledError:
                return replace(CANCELLED, environment=session.environment)
            except EnvironmentFailedError as error:
                _log.warning(
                    "session %s: agent %s: its environment failed: %s", session.id, task.agent, error
                )
                return AgentOutcome(_cause(error), environment_failed=True, environment=session.environment)
            except BaseException as error:  # users' code may raise anything, SystemExit would end the loop
                _log.exception("session %s: agent %s failed", session.id, task.agent)
                return AgentOutcome(_cause(error), environment=session.environment)
            return AgentOutcome(reward=reward, environment=session.environment)

    def _forget(self, session: _AgentCall) -> None:
        if session.num_listeners == 0 and self._sessions.get(session.id) is session:
            self.cancel(session.id)
            del self._sessions[session.id]


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_CAUSE]


def _reward(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the agent function returned {value!r:.100}, expected a finite number or None")
    return float(value)
