"""A coordinator's door without a run behind it."""

from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import Histogram

from atoll.coordinator.control import RunControl
from atoll.coordinator.service import CoordinatorService
from atoll.runtime.server import Server
from tests.tokens import TOKEN

NOTHING: Final[Any] = SimpleNamespace(services=tuple, health=tuple)  # neither services nor external servers


async def serve_coordinator(
    control: RunControl, registry: Any = NOTHING, *, calls: Histogram | None = None
) -> Server:
    """At a free port, for holders of TOKEN; no external server can join."""
    return await Server.start(
        "atoll.v1.Coordinator",
        CoordinatorService("toy", registry, NOTHING, control).add_to,
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="coordinator.port",
        calls=calls,
    )
