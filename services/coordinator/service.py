"""The Coordinator servicer: service leases, external servers, and operator commands."""

from typing import Final

import grpc
import grpc.aio

from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.rewards.servers import Servers
from atoll.wire.codec.fleet import decode_server, decode_service, encode_run_status, encode_service
from atoll.wire.info import RunStatus
from atoll.wire.v1 import coordinator_pb2 as pb
from atoll.wire.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

OPERATORS_MAY: Final = frozenset(  # methods for operators
    {
        *("Status", "AddServer", "RemoveServer", "PauseRun", "ResumeRun", "StopRun", "Checkpoint"),
        *("DrainService", "Scale"),
    }
)
ANSWER_BEFORE_DEADLINE_S = 3.0  # lets a briefly busy coordinator still answer in time


class CoordinatorService(CoordinatorServicer):
    def __init__(self, run: str, registry: Registry, servers: Servers, control: RunControl) -> None:
        self._run = run
        self._registry = registry
        self._servers = servers
        self._control = control

    def add_to(self, server: grpc.aio.Server) -> None:
        add_CoordinatorServicer_to_server(self, server)

    async def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        lease_s = await self._registry.register(decode_service(request.service))
        return pb.RegisterReply(lease_s=lease_s, epoch=self._registry.epoch)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatReply:
        entry = decode_service(request.service)
        known = await self._registry.renew(entry)
        drain = self._control.departures.is_told(entry)
        return pb.HeartbeatReply(known=known, epoch=self._registry.epoch, drain=drain)

    async def Deregister(
        self, request: pb.DeregisterRequest, context: grpc.ServicerContext
    ) -> pb.DeregisterReply:
        await self._registry.deregister(decode_service(request.service))
        await self._control.report()
        return pb.DeregisterReply()

    async def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        await self._control.departures.drain(decode_service(request.service))
        return pb.DrainReply()

    async def DrainService(
        self, request: pb.DrainServiceRequest, context: grpc.ServicerContext
    ) -> pb.DrainServiceReply:
        entry, warning = await self._control.tell_to_leave(request.name, self._registry.services())
        return pb.DrainServiceReply(service=encode_service(entry), warning=warning)

    async def Scale(self, request: pb.ScaleRequest, context: grpc.ServicerContext) -> pb.ScaleReply:
        await self._control.scale(request.role, request.number)
        return pb.ScaleReply()

    async def AddServer(
        self, request: pb.AddServerRequest, context: grpc.ServicerContext
    ) -> pb.AddServerReply:
        await self._servers.add(decode_server(request.server))
        return pb.AddServerReply()

    async def RemoveServer(
        self, request: pb.RemoveServerRequest, context: grpc.ServicerContext
    ) -> pb.RemoveServerReply:
        removed = await self._servers.remove(request.kind, request.name, request.url)
        return pb.RemoveServerReply(removed=removed)

    async def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        remaining = context.time_remaining() - ANSWER_BEFORE_DEADLINE_S
        progress = await self._control.follow(request.seen, max(remaining, 0.0))
        return encode_run_status(
            RunStatus(
                run=self._run,
                state=progress.state.value,
                step=progress.step,
                num_steps=progress.num_steps,
                version=progress.version,
                error=progress.error or progress.note,
                services=tuple(self._registry.services()),
                metrics=progress.metrics,
                revision=progress.revision,
                servers=tuple(self._servers.health()),
                seconds=self._control.seconds,
                replicas=self._control.scaling.number,
                drained=self._control.departures.told,
            )
        )

    async def PauseRun(self, request: pb.PauseRunRequest, context: grpc.ServicerContext) -> pb.PauseRunReply:
        await self._control.pause()
        return pb.PauseRunReply()

    async def ResumeRun(
        self, request: pb.ResumeRunRequest, context: grpc.ServicerContext
    ) -> pb.ResumeRunReply:
        await self._control.resume()
        return pb.ResumeRunReply()

    async def StopRun(self, request: pb.StopRunRequest, context: grpc.ServicerContext) -> pb.StopRunReply:
        await self._control.stop()
        return pb.StopRunReply()

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: grpc.ServicerContext
    ) -> pb.CheckpointReply:
        return pb.CheckpointReply(path=await self._control.request_checkpoint())
