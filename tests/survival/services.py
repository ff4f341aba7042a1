"""Services started by hand, as containers start them: without a launcher, each with its own log."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.config.load import write_resolved
from atoll.config.schema import RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.parent_death import with_parent_death
from atoll.runtime.ports import reserve_port
from tests.survival.moments import HANG_S, environment
from tests.tokens import TOKEN


class Services:
    """Those of a run. Leaving the context kills what is left of them."""

    def __init__(self, config: RunConfig) -> None:
        """`config` has a coordinator.port, unless a launcher runs the coordinator."""
        self.config = config
        self.processes: dict[str, Process] = {}
        self._logs = config.folder / "logs"
        self._environment = {"OMP_NUM_THREADS": "1", **environment(config.run.dir)}
        self._stack = AsyncExitStack()
        self._store_port = 0

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.config.coordinator.port}"

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.address, Caller(token=TOKEN))

    async def start_store(self) -> None:
        """Returns once it serves."""
        self._store_port = self._stack.enter_context(reserve_port())
        folder = self.config.folder / "store"
        process = await self._spawn(
            "store", "store", "--folder", folder, "--port", self._store_port, out=PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), HANG_S)

    async def start_coordinator(self, config: RunConfig | None = None) -> None:
        """As a container does: every start may be one that resumes. `config`: from now on."""
        self.config = config or self.config
        write_resolved(self.config, self.config.folder / "config.json")
        url = f"redis://:{TOKEN}@127.0.0.1:{self._store_port}/0"
        await self._spawn("coordinator", "coordinator", *self._config(), "--store", url, "--resume")

    async def start(self, role: str, name: str, address: str = "", *arguments: str) -> Process:
        """A service, or another life of it. `address`: of a coordinator that a launcher runs."""
        words = [*self._config(), "--name", name, "--coordinator", address or self.address, *arguments]
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"} if role == "trainer" else {}
        if role == "trainer":
            ranks["MASTER_PORT"] = str(self._stack.enter_context(reserve_port()))
        python = self.config.rollout.python if role == "rollout" else None
        return await self._spawn(name, role, *words, python=python, **ranks)

    async def terminate(self, name: str) -> int:
        """SIGTERM; returns the exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return await self.wait(name)

    async def wait_for_all(self) -> dict[str, int]:
        """The exit codes of all but the store, once they have ended by themselves."""
        return {name: await self.wait(name) for name in self.processes if name != "store"}

    async def wait(self, name: str) -> int:
        """Its exit code."""
        return await asyncio.wait_for(self.processes[name].wait(), HANG_S)

    def _config(self) -> tuple[str, str]:
        return "--config", str(self.config.folder / "config.json")

    async def _spawn(
        self,
        name: str,
        role: str,
        *words: object,
        out: int | None = None,
        python: Path | None = None,
        **environment: str,
    ) -> Process:
        """`python`: instead of the command `atoll serve`, which executes `python -m atoll.ROLE`."""
        serve = (Path(sys.executable).with_name("atoll"), "serve", role)
        command = (python, "-m", f"atoll.{role}") if python else serve
        with (self._logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *with_parent_death(*map(str, (*command, *words))),
                stdin=DEVNULL,
                stdout=out or log,
                stderr=STDOUT if out is None else log,
                env={**os.environ, **self._environment, **environment},
                start_new_session=True,
            )
        self.processes[name] = process
        self._stack.push_async_callback(_kill, process)
        return process


async def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
