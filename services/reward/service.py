"""The reward servicer: Score, Execute, Describe and Reload of package atoll.v1."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self

import grpc.aio

from atoll.config.schema import RewardSection, SandboxConfig
from atoll.reward.graders import GraderPanel, modules_to_preload, needs_sandbox, needs_workers
from atoll.reward.isolated_grader import start_fork_server
from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.runtime.errors import OverloadedError, UserError
from atoll.runtime.process import ServiceContext
from atoll.wire.codec.rewards import (
    decode_execute,
    decode_score,
    encode_execution,
    encode_reward_info,
    encode_verdict,
)
from atoll.wire.info import RewardInfo
from atoll.wire.types import ProgramLimits, ScoreItem
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RewardService(reward_pb2_grpc.RewardServicer):
    """Accepts at most `max_queued` responses at a time, over all calls, and as many calls of Execute. The
    sandbox counts programs of the two separately, so neither keeps the other waiting."""

    def __init__(
        self, section: RewardSection, panel: GraderPanel, sandbox: Sandbox | None, resources: AsyncExitStack
    ) -> None:
        """Closes `resources` at the end."""
        self._settings = section.sandbox or SandboxConfig()
        self._max_queued = section.max_queued
        self._panel = panel
        self._sandbox = sandbox
        self._tools = sandbox.apart(self._settings.executions) if sandbox else None
        self._resources = resources
        self._held = 0  # responses
        self._executing = 0  # calls of Execute, running or waiting
        self._retiring: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        return await cls.start(context.config.reward)

    @classmethod
    async def start(cls, section: RewardSection) -> Self:
        """Call it from the main thread. Raises UserError if a grader cannot be loaded, SandboxError if this
        machine cannot confine programs."""
        async with AsyncExitStack() as resources:
            panel, sandbox = await start_panel(section, resources)
            return cls(section, panel, sandbox, resources.pop_all())

    def add_to(self, server: grpc.aio.Server) -> None:
        reward_pb2_grpc.add_RewardServicer_to_server(self, server)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: Context
    ) -> AsyncIterator[reward_pb2.ScoreReply]:
        """If a grader hangs or crashes, only that response's verdict fails. Each verdict frees a place."""
        left = self._take_places(len(request.items))
        try:
            async with aclosing(self._panel.verdicts(_decode_items(request))) as ready:
                async for verdicts in ready:
                    left -= len(verdicts)
                    self._held -= len(verdicts)
                    yield reward_pb2.ScoreReply(verdicts=map(encode_verdict, verdicts))
        finally:
            self._held -= left

    async def Execute(self, request: reward_pb2.ExecuteRequest, context: Context) -> reward_pb2.ExecuteReply:
        """Waits for one of `executions` places, in order. Limits are capped by [reward.sandbox] and by the
        call's deadline."""
        if self._tools is None:
            raise UserError(
                "Execute: this reward service has no sandbox: add [reward.sandbox] to the run's TOML file"
            )
        source, stdin, limits = decode_execute(request)
        sizes = limits.memory_bytes, limits.output_bytes, limits.disk_bytes
        if not (0 < limits.timeout_s < math.inf and min(sizes) > 0):
            raise UserError(
                f"Execute: got {limits}, expected limits above 0 and a finite timeout_s, "
                "or none for the default"
            )
        if self._executing >= self._max_queued:
            raise OverloadedError(
                f"{self._executing} programs of tools run or wait, as many as reward.max_queued: try another "
                "service, or retry later"
            )
        self._executing += 1
        try:
            bounded = self._bounded(limits, context.time_remaining() or math.inf)
            return encode_execution(await self._tools.run(source, stdin, bounded))
        finally:
            self._executing -= 1

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: Context
    ) -> reward_pb2.DescribeReply:
        tier = self._sandbox.tier if self._sandbox else ""
        disk_bytes = self._settings.disk_mb << 20 if "namespaces" in tier else 0
        info = RewardInfo(tuple(self._panel.names), self._max_queued, tier, disk_bytes)
        return encode_reward_info(info)

    async def Reload(self, request: reward_pb2.ReloadRequest, context: Context) -> reward_pb2.ReloadReply:
        """Changes nothing if a file cannot be loaded."""
        async with self._reloading:
            old, self._panel = self._panel, await self._panel.reload()
        retiring = asyncio.create_task(old.retire(self._panel))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        return reward_pb2.ReloadReply()

    async def wait_for_failure(self) -> None:
        await asyncio.Event().wait()  # broken parts are replaced, or reported in each verdict

    async def close(self) -> None:
        await asyncio.gather(*self._retiring)
        await self._panel.retire()
        await self._resources.aclose()

    def _take_places(self, count: int) -> int:
        if count > self._max_queued:
            raise UserError(
                f"Score: {count} responses in one call; this service accepts at most {self._max_queued} "
                "(reward.max_queued): send fewer, or raise it"
            )
        if self._held + count > self._max_queued:
            raise OverloadedError(
                f"{self._held} responses are queued or being graded, {count} more would exceed "
                f"reward.max_queued = {self._max_queued}: try another service, or retry later"
            )
        self._held += count
        return count

    def _bounded(self, limits: ProgramLimits, remaining_s: float) -> ProgramLimits:
        most = self._settings
        return ProgramLimits(
            timeout_s=min(limits.timeout_s, remaining_s),
            memory_bytes=min(limits.memory_bytes, most.memory_mb << 20),
            output_bytes=min(limits.output_bytes, most.output_kb << 10),
            disk_bytes=min(limits.disk_bytes, most.disk_mb << 20),
        )


async def start_panel(
    section: RewardSection, resources: AsyncExitStack
) -> tuple[GraderPanel, Sandbox | None]:
    """All graders that are no external servers, and the sandbox, which `resources` closes, if there is one.
    As `RewardService.start`."""
    graders = [config for config in section.graders if config.server is None]
    if any(needs_workers(config) for config in graders):
        start_fork_server(modules_to_preload(graders))
    settings, sandbox = section.sandbox or SandboxConfig(), None
    if section.sandbox is not None or any(needs_sandbox(config) for config in graders):
        starting = start_sandbox(settings.programs, settings.namespaces == "auto")
        sandbox = await resources.enter_async_context(starting)
    return await GraderPanel.start(graders, sandbox, settings.programs), sandbox


def _decode_items(request: reward_pb2.ScoreRequest) -> list[ScoreItem]:
    try:
        return decode_score(request)
    except ValueError as error:
        raise UserError(f"Score: {error}") from None
