"""Calls that take as long as their work does: not their length is bounded, but the silence in them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from atoll.runtime.errors import AtollError, ServiceUnavailableError

T = TypeVar("T")

LOOKS = 8  # at the progress, in the longest silence


async def while_it_progresses(
    call: Awaitable[T], progress: Callable[[], Awaitable[int]], silence_s: float
) -> T:
    """Waits for `call` as long as `progress` answers another number at least every `silence_s` seconds.

    Raises ServiceUnavailableError after a longer silence; the call is cancelled then.
    """
    task, look_s = asyncio.ensure_future(call), silence_s / LOOKS
    try:
        done, _ = await asyncio.wait((task,), timeout=look_s)  # nearly all calls end within it
        if not done:
            await _until_done_or_silent(task, progress, look_s)
        if not task.done():
            raise ServiceUnavailableError(f"it has made no progress for {silence_s:g} s")
        return await task
    finally:
        task.cancel()


async def _until_done_or_silent(
    task: asyncio.Future[T], progress: Callable[[], Awaitable[int]], look_s: float
) -> None:
    silence = asyncio.create_task(_silence(progress, look_s))
    try:
        await asyncio.wait((task, silence), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await silence
    finally:
        silence.cancel()


async def _silence(progress: Callable[[], Awaitable[int]], look_s: float) -> None:
    """Returns after LOOKS looks in a row that saw nothing new; no answer is nothing new, too.

    Looks are counted, not seconds: if this process itself stands still, that is nobody's silence.
    """
    clock = asyncio.get_running_loop().time
    seen, num_quiet = -1, 0
    while num_quiet < LOOKS:
        number, end = seen, clock() + look_s
        with suppress(AtollError, TimeoutError):
            async with asyncio.timeout_at(end):
                number = await progress()
        num_quiet = num_quiet + 1 if number == seen else 0
        seen = number
        if num_quiet < LOOKS:
            await asyncio.sleep(end - clock())
