"""A process that was stopped, on a clock that the test moves."""

import asyncio
import time
from collections.abc import Callable

import pytest

from atoll.runtime.awake_loop import MAX_STEP_S, AwakeLoop


class Clock:
    """The machine's, which goes on while the process stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def stand_still(self) -> None:
        self.now += 30.0


@pytest.mark.parametrize("stops", ["in a task", "while it waits"])
def test_an_answer_that_came_during_a_standstill_is_received_before_its_timeout(stops: str) -> None:
    clock = Clock()

    async def ask() -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with asyncio.timeout(10):
            if stops == "in a task":
                clock.stand_still()
                await asyncio.sleep(0)
            else:
                await asyncio.to_thread(clock.stand_still)
        return loop.time() - begun

    with asyncio.Runner(loop_factory=lambda: AwakeLoop(clock)) as runner:
        assert runner.run(ask()) == MAX_STEP_S


def test_timers_expire_in_their_order_while_the_process_runs() -> None:
    async def run(clock: Callable[[], float]) -> list[float]:
        expired: list[float] = []
        done = asyncio.Event()
        loop, begun = asyncio.get_running_loop(), clock()
        for delay_s in (0.6, 0.02, 0.3):
            loop.call_later(delay_s, expired.append, delay_s)
        loop.call_later(0.6, done.set)
        await done.wait()
        assert clock() - begun >= 0.6
        return expired

    with asyncio.Runner(loop_factory=lambda: AwakeLoop(time.monotonic)) as runner:
        assert runner.run(run(time.monotonic)) == [0.02, 0.3, 0.6]
