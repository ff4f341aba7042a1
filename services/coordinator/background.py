"""Background work of the loop; awaiting its results raises its failure."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from atoll.runtime.errors import AtollError, ServiceUnavailableError

T = TypeVar("T")


class BackgroundWork:
    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work`, which runs until `end`."""
        self._work = asyncio.create_task(work)

    async def wait_for(self, result: Coroutine[Any, Any, T]) -> T:
        """Waits for `result`, which the work provides. Raises the work's error if it fails first."""
        waiting = asyncio.create_task(result)
        try:
            await asyncio.wait([waiting, self._work], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise self._failure()
        finally:
            waiting.cancel()

    async def end(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.exception()  # the loop has raised it, or ends for another reason

    def _failure(self) -> BaseException:
        error = self._work.exception()
        assert error is not None, "it runs until it is cancelled"
        cause = first_cause(error)
        if isinstance(
            cause, ServiceUnavailableError
        ):  # anything but a lost trainer, from which the run recovers
            return AtollError(str(cause))
        return cause


def first_cause(error: BaseException) -> BaseException:
    """The error of the task that failed first, of tasks that ended together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
