"""Messages that arrive together are written together."""

import asyncio
from collections.abc import Sequence

import pytest

from atoll.runtime.errors import StoreError
from atoll.runtime.write_batcher import GATHER_FACTOR, MAX_GATHER_S, WriteBatcher
from tests import virtual_clock


class Store:
    """Takes a while to write; answers each message with its names, reversed."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.writes: list[list[str | bytes]] = []

    async def write(self, words: Sequence[str | bytes]) -> list[str]:
        self.writes.append(list(words))
        await asyncio.sleep(self.seconds)
        return [str(names)[::-1] for names in words[::2]]


@pytest.mark.parametrize(("write_s", "gather_s"), [(0.001, GATHER_FACTOR * 0.001), (1.0, MAX_GATHER_S)])
def test_a_message_is_written_at_once_and_those_behind_it_share_a_write(
    write_s: float, gather_s: float
) -> None:
    async def run() -> None:
        store = Store(write_s)
        arrivals = WriteBatcher(store.write)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1)
        begun = loop.time()
        assert await arrivals.write("ab", b"1") == "ba"
        assert loop.time() == pytest.approx(begun + write_s)
        messages = [("cd", b"2"), ("ef", b"3"), ("gh", b"4")]
        answers = await asyncio.gather(*(arrivals.write(*message) for message in messages))
        assert answers == ["dc", "fe", "hg"]
        assert loop.time() == pytest.approx(begun + write_s + gather_s + write_s)
        assert store.writes == [["ab", b"1"], ["cd", b"2", "ef", b"3", "gh", b"4"]]

    virtual_clock.run(run())


def test_messages_that_come_during_a_write_share_the_next_one() -> None:
    async def run() -> None:
        store = Store(seconds=1.0)
        arrivals = WriteBatcher(store.write)
        first = asyncio.create_task(arrivals.write("a", b"1"))
        await asyncio.sleep(0.5)
        others = [asyncio.create_task(arrivals.write(name, b"2")) for name in ("b", "c")]
        assert await asyncio.gather(first, *others) == ["a", "b", "c"]
        assert [len(words) // 2 for words in store.writes] == [1, 2]

    virtual_clock.run(run())


def test_a_write_that_fails_is_raised_by_whoever_waits_for_it() -> None:
    async def fail(words: Sequence[str | bytes]) -> list[str]:
        raise StoreError("gone")

    async def run() -> None:
        arrivals = WriteBatcher(fail)
        outcomes = await asyncio.gather(
            arrivals.write("a", b"1"), arrivals.write("b", b"2"), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [StoreError, StoreError]

    virtual_clock.run(run())
