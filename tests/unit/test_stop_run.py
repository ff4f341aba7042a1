"""What a first interrupt does: the run stops after its step, however long that takes and whoever is busy."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.cli.launch.interrupts import stop_run
from atoll.runtime.errors import ServiceUnavailableError
from tests import virtual_clock

SILENT = ServiceUnavailableError("Coordinator.Status at host:1: no answer within 10 s")


class FakeCoordinator:
    """Answers Status with the next of `looks`, at last with none; an exception is raised."""

    def __init__(self, *looks: tuple[str, int] | Exception, silent_to_stops: int = 0) -> None:
        self._looks = list(looks)
        self._silent_to_stops = silent_to_stops
        self.revision = 0
        self.stops = 0

    async def status(self, seen: int) -> Any:
        assert seen <= self.revision
        if not self._looks:
            await asyncio.sleep(7 * 86400.0)
            return None
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        self.revision += 1
        state, step = look
        return SimpleNamespace(state=state, step=step, num_steps=9, revision=self.revision)

    async def stop_run(self) -> None:
        if self._silent_to_stops:
            self._silent_to_stops -= 1
            raise SILENT
        self.stops += 1


async def stopping(coordinator: FakeCoordinator) -> bool:
    """Whether it returned within a day."""
    stop = asyncio.Event()
    stop.set()
    task = asyncio.create_task(stop_run(stop, coordinator))  # type: ignore[arg-type]
    await asyncio.wait({task}, timeout=86400.0)
    return not task.cancel()


def test_the_end_is_waited_for_as_long_as_it_takes_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = FakeCoordinator(("training", 3), ("training", 3), ("writing the last checkpoint", 4))
    assert not virtual_clock.run(stopping(coordinator))
    assert coordinator.stops == 1
    assert caplog.messages == [
        f"stopping: waiting for the run, which is {what} of 9; interrupt again to stop immediately"
        for what in ("training after step 3", "writing the last checkpoint after step 4")
    ]


@pytest.mark.parametrize(
    "busy",
    [
        lambda: FakeCoordinator(SILENT, SILENT, ("training", 3)),
        lambda: FakeCoordinator(("training", 3), ("training", 3), silent_to_stops=1),
    ],
)
def test_a_coordinator_that_is_too_busy_to_answer_is_told_later(
    busy: Callable[[], FakeCoordinator], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    coordinator = busy()
    assert not virtual_clock.run(stopping(coordinator))
    assert coordinator.stops == 1
    assert "no answer within 10 s" in caplog.messages[0]
    assert "after step 3" in caplog.messages[-1]


@pytest.mark.parametrize("state", ["starting", "recovering"])
def test_a_run_with_nothing_to_finish_is_not_waited_for(state: str) -> None:
    coordinator = FakeCoordinator((state, 0))
    assert virtual_clock.run(stopping(coordinator))
    assert coordinator.stops == 0
