"""An event loop whose clock stops while its process cannot run, such as by SIGSTOP or swapping."""

import asyncio
import selectors
import time
from collections.abc import Callable

MAX_STEP_S = 0.5  # by which its clock advances at once
LOOK_S = 0.25  # between two readings of an idle loop


class AwakeLoop(asyncio.SelectorEventLoop):
    """Timeouts on this loop measure for how long an answer could have been received.

    A suspension counts as MAX_STEP_S: what arrived during it is received before further timeouts expire.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = self._awake_s = clock()
        super().__init__(_Selector())

    def time(self) -> float:
        now = self._clock()
        self._awake_s += min(now - self._seen, MAX_STEP_S)
        self._seen = now
        return self._awake_s


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """May end early without an event, so that the loop reads its clock in time."""
        return super().select(LOOK_S if timeout is None else min(timeout, LOOK_S))
