"""Calls that last as long as something happens, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from atoll.runtime.errors import ServiceUnavailableError, WeightPushError
from atoll.runtime.progress_timeout import await_with_progress
from tests import virtual_clock


async def lasting(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def growing() -> Callable[[], Awaitable[int]]:
    """One more each second."""

    async def progress() -> int:
        return int(asyncio.get_running_loop().time())

    return progress


async def stuck() -> int:
    return 7


async def away() -> int:
    raise ServiceUnavailableError("connection refused")


async def never() -> int:
    return await asyncio.Event().wait()


def test_a_call_may_last_for_hours_while_something_happens() -> None:
    assert virtual_clock.run(await_with_progress(lasting(10_000), growing(), 10)) == "done"


@pytest.mark.parametrize("progress", [stuck, away, never])
def test_a_call_in_which_nothing_happens_is_given_up(progress: Callable[[], Awaitable[int]]) -> None:
    async def scene() -> None:
        call = asyncio.create_task(lasting(10_000))
        with pytest.raises(ServiceUnavailableError, match="no progress for 10 s"):
            await await_with_progress(call, progress, 10)
        assert asyncio.get_running_loop().time() <= 12.5
        assert call.cancelling()

    virtual_clock.run(scene())


def test_a_process_that_stood_still_itself_gives_up_no_call() -> None:
    async def scene() -> None:
        waiting = asyncio.create_task(await_with_progress(lasting(100), growing(), 10))
        await asyncio.sleep(5.5)  # virtual ones: between two looks
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_clock.VirtualClock)
        loop.stand_still(50)
        assert await waiting == "done"

    virtual_clock.run(scene())


@pytest.mark.parametrize("progress", [stuck, away, never])
def test_a_short_call_needs_no_progress(progress: Callable[[], Awaitable[int]]) -> None:
    assert virtual_clock.run(await_with_progress(lasting(9), progress, 10)) == "done"


def test_the_calls_own_error_is_raised() -> None:
    async def fails() -> None:
        await asyncio.sleep(100)
        raise WeightPushError("a slice is wrong")

    with pytest.raises(WeightPushError, match="a slice is wrong"):
        virtual_clock.run(await_with_progress(fails(), growing(), 10))


def test_who_gives_up_waiting_ends_the_call() -> None:
    async def scene() -> None:
        call = asyncio.create_task(lasting(10_000))
        waiting = asyncio.create_task(await_with_progress(call, growing(), 10))
        await asyncio.sleep(50)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert call.cancelling()

    virtual_clock.run(scene())
