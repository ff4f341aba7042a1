"""Counts recent failures: old ones do not prevent a restart."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600.0


class FailureWindow:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def record(self) -> int:
        """Records a failure; returns the number within WINDOW_S, including this one."""
        now = self._clock()
        self._times.append(now)
        while self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        return len(self._times)
