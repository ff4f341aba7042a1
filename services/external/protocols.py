"""Which client speaks which protocol."""

from collections.abc import Callable, Mapping

from services.external.base import ExternalClient
from services.external.grpc import GrpcReward, GrpcTool
from services.external.http import HttpReward
from services.external.mcp import McpReward, McpTool
from services.external.nemo_gym import NemoGymReward
from services.external.openenv import OpenEnvEnv, OpenEnvReward
from services.external.trainer import TrainerRewards
from services.runtime.errors import UserError
from services.wire.types import ExternalServer

Build = Callable[[ExternalServer, str | None], ExternalClient]

CLIENTS: Mapping[tuple[str, str], Build] = {  # by kind and protocol
    ("reward", "grpc"): GrpcReward,
    ("reward", "http"): HttpReward,
    ("reward", "nemo_gym"): NemoGymReward,
    ("reward", "mcp"): McpReward,
    ("reward", "openenv"): OpenEnvReward,
    ("reward", "trainer"): TrainerRewards,
    ("tool", "grpc"): GrpcTool,
    ("tool", "mcp"): McpTool,
    ("env", "openenv"): OpenEnvEnv,
}


def connect(server: ExternalServer, token: str | None) -> ExternalClient:
    """Makes no call yet. Raises UserError where nothing of that kind speaks the protocol."""
    client = CLIENTS.get((server.kind, server.protocol))
    if client is None:
        known = ", ".join(protocol for kind, protocol in CLIENTS if kind == server.kind)
        raise UserError(
            f"{server.kind} server {server.name}: protocol {server.protocol!r}; such servers speak {known}"
        )
    return client(server, token)
