"""What the engine tells SGLang and when, with a server that is played by hand."""

import asyncio
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.rollout.engines.sglang.engine import SGLangEngine
from atoll.rollout.engines.sglang.messages import SGLangError
from atoll.rollout.engines.sglang.server import ServerLimits, SGLangServer
from atoll.runtime.errors import EngineDiedError
from atoll.wire.types import PauseMode, Version


class PlayedServer:
    """Notes what it is told at once; answers when the test lets it."""

    def __init__(self) -> None:
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []
        self.stirred = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses = False

    async def control(self, path: str, body: Mapping[str, Any]) -> None:
        self.told.append(path)
        self.stirred.set()
        await self.answers.wait()
        if self.refuses:
            raise SGLangError(f"SGLang did not answer {path}")

    async def state(self) -> dict[str, Any]:
        return {}

    async def kill(self) -> None:
        self.exit.set_result(-9)

    def death(self) -> EngineDiedError:
        return EngineDiedError("the SGLang server ended by SIGKILL")


@pytest.fixture
async def server() -> PlayedServer:
    return PlayedServer()


@pytest.fixture
async def engine(server: PlayedServer) -> SGLangEngine:
    workers: Any = SimpleNamespace()
    return SGLangEngine(
        cast(SGLangServer, server), workers, ServerLimits(4, 64, 64), 64, "float32", Version("a3f0", 0)
    )


async def give_up_in_its_midst(server: PlayedServer, call: Coroutine[Any, Any, None]) -> None:
    """Cancels the call while SGLang has not answered what it tells it."""
    server.stirred.clear()
    server.answers.clear()
    caller = asyncio.create_task(call)
    await asyncio.wait_for(server.stirred.wait(), 20)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    server.answers.set()


async def test_a_pause_that_was_given_up_is_ended_by_resume(engine: SGLangEngine, server: PlayedServer):
    await give_up_in_its_midst(server, engine.pause(PauseMode.IN_PLACE))
    await engine.resume()
    assert server.told == ["/pause_generation", "/continue_generation"]


async def test_after_a_resume_that_was_given_up_a_pause_pauses(engine: SGLangEngine, server: PlayedServer):
    await engine.pause(PauseMode.IN_PLACE)
    await give_up_in_its_midst(server, engine.resume())
    await engine.pause(PauseMode.IN_PLACE)
    assert server.told == ["/pause_generation", "/continue_generation", "/pause_generation"]


async def test_a_server_that_may_stand_still_for_good_is_ended(engine: SGLangEngine, server: PlayedServer):
    await engine.pause(PauseMode.IN_PLACE)
    server.refuses = True
    with pytest.raises(SGLangError, match="did not answer /continue_generation"):
        await engine.resume()
    with pytest.raises(EngineDiedError):
        await asyncio.wait_for(engine.wait_for_failure(), 20)
