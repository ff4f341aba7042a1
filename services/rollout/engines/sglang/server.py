"""SGLang's server as a child process, controlled over loopback HTTP."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import aiohttp

from atoll.rollout.engines.sglang.messages import Json, SGLangError
from atoll.runtime.errors import EngineDiedError, UserError
from atoll.runtime.parent_death import with_parent_death
from atoll.runtime.ports import reserve_port

_log = logging.getLogger(__name__)

LAUNCH: Final = "atoll.rollout.engines.sglang.launch"  # it imports SGLang
POLL_S: Final = 0.2  # between two polls of a starting server
DEATH_S: Final = 15.0  # SGLang takes a second or two to end once one of its processes is gone
# Deadlines of a part (weights.deadline_s) until a silent server is killed. Until its own deadline, a
# broadcast that waits for a slow peer occupies the GPU, and perhaps a decode step behind it.
CONTROL_DEADLINES: Final = 3


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The server's limits."""

    slots: int  # samples at once
    max_length: int  # tokens of prompt and response
    max_candidates: int  # tokens to choose from wherever some are cut off


def limits_of(state: Json) -> ServerLimits:
    """Limits from the server's own state."""
    return ServerLimits(
        slots=state["internal_states"][0]["effective_max_running_requests_per_dp"],
        max_length=state["max_req_input_len"],
        max_candidates=state["sampling_mask_max_tokens"],
    )


class SGLangServer:
    """One `sglang.launch_server` and its workers: a process group of its own that ends with this process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        url: str,
        folder: TemporaryDirectory[str],
        control_timeout_s: float,
    ) -> None:
        self._process = process
        self._folder = folder
        self._control_timeout_s = control_timeout_s
        # a connection each: SGLang closes idle ones after five seconds, perhaps just as one is used again
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(
            url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        self.exit = asyncio.create_task(process.wait())  # its exit code

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        reserved_mib: int,
        start_timeout_s: float,
        control_timeout_s: float,
    ) -> Self:
        """Returns once it has answered its first request. `reserved_mib` of each GPU stay free for others;
        `control_timeout_s` bounds later calls other than generation. Raises UserError if SGLang refuses its
        arguments, EngineDiedError if it ends otherwise or takes longer than `start_timeout_s`."""
        folder = TemporaryDirectory(prefix="atoll-sglang-")  # its sockets, which a SIGKILL would leave behind
        with reserve_port() as port:
            process = await asyncio.create_subprocess_exec(
                *with_parent_death(
                    *(sys.executable, "-m", LAUNCH, str(reserved_mib)),
                    *arguments,
                    *("--port", str(port)),
                ),
                env={**os.environ, **environment, "TMPDIR": folder.name},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,
            )
            server = cls(process, f"http://127.0.0.1:{port}", folder, control_timeout_s)
            try:
                await server._wait_until_ready(start_timeout_s)
            except BaseException:
                await server.close()
                raise
        _log.info("SGLang answers at port %d, process %d", port, process.pid)
        return server

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The response's JSON, if any. Raises SGLangError if SGLang refuses, EngineDiedError if
        it is gone."""
        try:
            async with self._http.post(path, json=body) as reply:
                return await _read(reply)
        except aiohttp.ClientError as error:
            raise await self._lost(path, error) from error

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """`post`, for calls that take at most the control timeout."""
        try:
            async with asyncio.timeout(self._control_timeout_s):
                return await self.post(path, body)
        except TimeoutError:
            raise SGLangError(f"SGLang did not answer {path} within {self._control_timeout_s:g} s") from None

    async def state(self) -> Json:
        """Arguments and limits. Every scheduler process answers, after all that it was told before."""
        try:
            async with asyncio.timeout(self._control_timeout_s), self._http.get("/server_info") as reply:
                answer: Json = await _read(reply)
                return answer
        except aiohttp.ClientError as error:
            raise await self._lost("/server_info", error) from error

    def death(self) -> EngineDiedError:
        code = self.exit.result()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return EngineDiedError(
            f"the SGLang server (process {self._process.pid}) ended {how}: see the log above"
        )

    async def close(self) -> None:
        """Kills it: it needs no graceful shutdown."""
        await self.kill()
        await self._http.close()
        self._folder.cleanup()

    async def kill(self) -> None:
        """Ends all of its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            _log.debug("the SGLang server has ended before")
        await asyncio.wait({self.exit})

    async def _wait_until_ready(self, start_timeout_s: float) -> None:
        """Waits for the first good answer; the child's end and the deadline unblock it."""
        try:
            async with asyncio.timeout(start_timeout_s):
                while not await self._healthy():
                    await asyncio.wait({self.exit}, timeout=POLL_S)
                    if self.exit.done():
                        if self.exit.result() == 2:  # argparse's
                            raise UserError(
                                "SGLang refuses an argument of [rollout.sglang]: see the log above"
                            )
                        raise self.death()
        except TimeoutError:
            raise EngineDiedError(
                f"SGLang was not ready after {start_timeout_s:g} s (coordinator.start_timeout_s): "
                "see the log above"
            ) from None

    async def _healthy(self) -> bool:
        try:
            async with self._http.get("/health") as reply:
                ready: bool = reply.status == 200
                return ready
        except aiohttp.ClientError:  # it does not listen yet
            return False

    async def _lost(self, path: str, error: aiohttp.ClientError) -> EngineDiedError | SGLangError:
        await asyncio.wait({self.exit}, timeout=DEATH_S)
        if self.exit.done():
            return self.death()
        return SGLangError(f"SGLang's connection for {path} broke ({error!r}), but its process lives")


async def _read(reply: aiohttp.ClientResponse) -> Any:
    content = await reply.read()
    if reply.status != 200:
        raise SGLangError(
            f"SGLang answered {reply.status} to {reply.url.path}: {content.decode(errors='replace')}"
        )
    return json.loads(content) if reply.content_type == "application/json" else None
