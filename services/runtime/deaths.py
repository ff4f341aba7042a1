"""How often something has died of late: deaths of long ago do not speak against a restart."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600.0


class Deaths:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def count(self) -> int:
        """Notes another one; returns how many there were within WINDOW_S, this one included."""
        now = self._clock()
        self._times.append(now)
        while self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        return len(self._times)
