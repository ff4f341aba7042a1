"""An event loop on which time passes only where every task waits, and then at once."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.before_time_passes: Callable[[], None] = lambda: None
        self.at_each_tick: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.at_each_tick()
        ready = super().select(0)
        if not ready and timeout != 0:
            self.before_time_passes()
            if timeout is None:
                raise RuntimeError("every task waits for another, and none for a time")
            self.now += timeout
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def stand_still(self, seconds: float) -> None:
        """As if the process had been stopped for so long."""
        self._virtual.now += seconds

    def before_time_passes(self, check: Callable[[], None]) -> None:
        """`check` runs whenever all that can happen at this moment has happened."""
        self._virtual.before_time_passes = check

    def at_each_tick(self, check: Callable[[], None]) -> None:
        """`check` runs before each turn of the loop, in which every task that is ready runs once."""
        self._virtual.at_each_tick = check


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)


def timed(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test, on the virtual clock."""

    def run_test() -> None:
        run(test())

    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return run_test
