"""Work that runs beside the loop: whoever waits for what it does hears of its failure."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from atoll.runtime.errors import AtollError, ServiceUnavailableError

T = TypeVar("T")


class Beside:
    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        """`work` begins now and runs until `end`."""
        self._work = asyncio.create_task(work)

    async def wait_for(self, result: Coroutine[Any, Any, T]) -> T:
        """`result`, which comes from the work. Raises what the work failed with, if that comes first."""
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
            self._work.exception()  # the loop has heard of it, or ends for another reason

    def _failure(self) -> BaseException:
        error = self._work.exception()
        assert error is not None, "it runs until it is cancelled"
        cause = first_cause(error)
        if isinstance(cause, ServiceUnavailableError):  # no trainer, whose loss the run recovers from
            return AtollError(str(cause))
        return cause


def first_cause(error: BaseException) -> BaseException:
    """Of tasks that ended together, the error of the one that failed first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
