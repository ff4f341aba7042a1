"""Clients by protocol."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import cast

from atoll.external.base import ExternalClient
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer

Build = Callable[[ExternalServer, str | None], ExternalClient]

# By kind and protocol. Each is imported on first use: MCP's library would take two fifths of a coordinator's
# start.
CLIENTS: Mapping[tuple[str, str], str] = {
    ("reward", "grpc"): "grpc:GrpcReward",
    ("reward", "http"): "http:HttpReward",
    ("reward", "nemo_gym"): "nemo_gym:NemoGymReward",
    ("reward", "mcp"): "mcp:McpReward",
    ("reward", "openenv"): "openenv:OpenEnvReward",
    ("reward", "trainer"): "trainer:TrainerRewards",
    ("tool", "grpc"): "grpc:GrpcTool",
    ("tool", "mcp"): "mcp:McpTool",
    ("env", "openenv"): "openenv:OpenEnvEnv",
}


def connect(server: ExternalServer, token: str | None) -> ExternalClient:
    """Builds a client without calling the server. Raises UserError for an unknown protocol."""
    name = CLIENTS.get((server.kind, server.protocol))
    if name is None:
        known = ", ".join(protocol for kind, protocol in CLIENTS if kind == server.kind)
        raise UserError(
            f"{server.kind} server {server.name}: protocol {server.protocol!r}; such servers speak {known}"
        )
    build = cast(Build, resolve_name(f"atoll.external.{name}"))
    return build(server, token)
