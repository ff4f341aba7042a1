"""The coordinator's client."""

from collections.abc import AsyncIterator

from atoll.runtime.clients.base import CEILING_S, Caller, Client
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.codec.fleet import decode_run_status, decode_service, encode_server, encode_service
from atoll.wire.info import Renewal, RunStatus
from atoll.wire.types import ExternalServer, ServerKind, ServiceEntry
from atoll.wire.v1 import coordinator_pb2, coordinator_pb2_grpc


class CoordinatorClient(Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 10.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: coordinator_pb2_grpc.CoordinatorAsyncStub = coordinator_pb2_grpc.CoordinatorStub(
            self._channel
        )

    async def register(self, entry: ServiceEntry) -> tuple[float, int]:
        """Returns the seconds that the lease lasts, and the coordinator's epoch."""
        request = coordinator_pb2.RegisterRequest(service=encode_service(entry))
        reply = await self._call(self._stub.Register, request)
        return reply.lease_s, reply.epoch

    async def heartbeat(self, entry: ServiceEntry) -> Renewal:
        request = coordinator_pb2.HeartbeatRequest(service=encode_service(entry))
        reply = await self._call(self._stub.Heartbeat, request)
        return Renewal(known=reply.known, epoch=reply.epoch, drain=reply.drain)

    async def drain(self, entry: ServiceEntry, timeout_s: float) -> None:
        """This service gets no new work from now on. Returns once none is in progress here; raises
        ServiceUnavailableError if that takes longer than `timeout_s`."""
        request = coordinator_pb2.DrainRequest(service=encode_service(entry))
        await self._call(self._stub.Drain, request, timeout_s)

    async def drain_service(self, name: str) -> tuple[ServiceEntry, str]:
        """Tells the service to drain and to end. Returns its entry, and what the run waits for without it, if
        anything. Raises UserError if there is no service of that name."""
        request = coordinator_pb2.DrainServiceRequest(name=name)
        reply = await self._call(self._stub.DrainService, request)
        return decode_service(reply.service), reply.warning

    async def scale(self, role: str, number: int) -> None:
        """The launcher runs that many services of `role`. Raises UserError if it cannot."""
        await self._call(self._stub.Scale, coordinator_pb2.ScaleRequest(role=role, number=number))

    async def deregister(self, entry: ServiceEntry) -> None:
        request = coordinator_pb2.DeregisterRequest(service=encode_service(entry))
        await self._call(self._stub.Deregister, request)

    async def status(self, seen: int = 0) -> RunStatus:
        """Answers once the revision is not `seen` any more, at the latest shortly before the deadline."""
        request = coordinator_pb2.StatusRequest(seen=seen)
        return await self._query(self._stub.Status, request, decode_run_status)

    async def add_server(self, server: ExternalServer) -> None:
        """Raises UserError if it may not be registered, or does not answer properly."""
        request = coordinator_pb2.AddServerRequest(server=encode_server(server))
        timeout_s = 2 * server.timeout_s + self._timeout_s  # a connection, and a probe
        await self._call(self._stub.AddServer, request, timeout_s)

    async def remove_server(self, kind: ServerKind, name: str, url: str = "") -> int:
        """How many there were; without `url` all of that name go."""
        request = coordinator_pb2.RemoveServerRequest(kind=kind, name=name, url=url)
        return (await self._call(self._stub.RemoveServer, request)).removed

    async def pause_run(self) -> None:
        """The run stops between two steps."""
        await self._call(self._stub.PauseRun, coordinator_pb2.PauseRunRequest())

    async def resume_run(self) -> None:
        await self._call(self._stub.ResumeRun, coordinator_pb2.ResumeRunRequest())

    async def stop_run(self) -> None:
        """The run ends after the step in progress, as if it had been the last."""
        await self._call(self._stub.StopRun, coordinator_pb2.StopRunRequest())

    async def checkpoint(self, timeout_s: float = CEILING_S) -> str:
        """Saves after the step in progress; returns the checkpoint's path."""
        return (await self._call(self._stub.Checkpoint, coordinator_pb2.CheckpointRequest(), timeout_s)).path


async def statuses(client: CoordinatorClient) -> AsyncIterator[RunStatus]:
    """Yields the status now and after each change, without end: if the coordinator is busy or ending, asks
    again."""
    seen = 0
    while True:
        try:
            status = await client.status(seen)
        except ServiceUnavailableError:
            continue
        seen = status.revision
        yield status
