"""`python -m atoll.gateway`: one gateway instance."""

import gc

import uvloop

from atoll.gateway.instance import GatewayInstance
from atoll.runtime.process import run_service

# Allocations between garbage collections: cycles are rare, and each collection walks all open sessions.
GARBAGE = (20_000, 10, 10)

if __name__ == "__main__":
    gc.set_threshold(*GARBAGE)
    run_service("gateway", GatewayInstance.build, uvloop.new_event_loop)
