"""Services and external servers <-> messages of the coordinator. Pure."""

from atoll.wire.info import RunStatus
from atoll.wire.types import ExternalServer, ServerHealth, ServiceEntry
from atoll.wire.v1 import coordinator_pb2


def encode_server(server: ExternalServer) -> coordinator_pb2.ExternalServer:
    return coordinator_pb2.ExternalServer(
        kind=server.kind,
        name=server.name,
        url=server.url,
        protocol=server.protocol,
        options=server.options,
        auth=server.auth,
        concurrency=server.concurrency,
        timeout_s=server.timeout_s,
        address=server.address,
    )


def decode_server(message: coordinator_pb2.ExternalServer) -> ExternalServer:
    """Whether kind, protocol and options exist is for `atoll.external` to say."""
    return ExternalServer(
        kind=message.kind,  # type: ignore[arg-type]
        name=message.name,
        url=message.url,
        protocol=message.protocol,
        options=dict(message.options),
        auth=message.auth,
        concurrency=message.concurrency,
        timeout_s=message.timeout_s,
        address=message.address,
    )


def decode_stored_server(content: bytes) -> ExternalServer:
    """What the store keeps of a registered server: its message."""
    return decode_server(coordinator_pb2.ExternalServer.FromString(content))


def encode_server_health(health: ServerHealth) -> coordinator_pb2.ServerHealth:
    return coordinator_pb2.ServerHealth(
        server=encode_server(health.server), healthy=health.healthy, cause=health.cause
    )


def decode_server_health(message: coordinator_pb2.ServerHealth) -> ServerHealth:
    return ServerHealth(decode_server(message.server), message.healthy, message.cause)


def encode_service(entry: ServiceEntry) -> coordinator_pb2.ServiceEntry:
    return coordinator_pb2.ServiceEntry(
        role=entry.role, name=entry.name, incarnation=entry.incarnation, address=entry.address
    )


def decode_service(message: coordinator_pb2.ServiceEntry) -> ServiceEntry:
    return ServiceEntry(message.role, message.name, message.incarnation, message.address)


def encode_run_status(status: RunStatus) -> coordinator_pb2.StatusReply:
    return coordinator_pb2.StatusReply(
        run=status.run,
        state=status.state,
        step=status.step,
        num_steps=status.num_steps,
        version=status.version,
        error=status.error,
        services=[encode_service(entry) for entry in status.services],
        metrics=status.metrics,
        revision=status.revision,
        servers=[encode_server_health(health) for health in status.servers],
        seconds=status.seconds,
        replicas=status.replicas,
        drained=status.drained,
    )


def decode_run_status(message: coordinator_pb2.StatusReply) -> RunStatus:
    return RunStatus(
        run=message.run,
        state=message.state,
        step=message.step,
        num_steps=message.num_steps,
        version=message.version,
        error=message.error,
        services=tuple(decode_service(service) for service in message.services),
        metrics=dict(message.metrics),
        revision=message.revision,
        servers=tuple(decode_server_health(server) for server in message.servers),
        seconds=message.seconds,
        replicas=message.replicas,
        drained=tuple(message.drained),
    )
