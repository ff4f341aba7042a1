"""Timeouts by progress: bounds a call's silence instead of its duration."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from atoll.runtime.errors import AtollError, ServiceUnavailableError

T = TypeVar("T")

LOOKS = 8  # polls of the progress during the longest silence


async def await_with_progress(
    call: Awaitable[T], progress: Callable[[], Awaitable[int]], silence_s: float
) -> T:
    """Awaits `call` while `progress` returns a new number at least every `silence_s` seconds.

    Raises ServiceUnavailableError after a longer silence; the call is cancelled then.
    """
    task, look_s = asyncio.ensure_future(call), silence_s / LOOKS
    try:
        done, _ = await asyncio.wait((task,), timeout=look_s)  # most calls end within it
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
    """Returns after LOOKS consecutive polls without progress; a failed poll counts as no progress.

    Counts polls, not seconds, so that a stall of this process does not count as silence.
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
