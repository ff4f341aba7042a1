"""`python -m atoll.gateway`: one gateway instance."""

import gc

import uvloop

from atoll.gateway.instance import GatewayInstance
from atoll.runtime.malloc import map_large_blocks
from atoll.runtime.process import GARBAGE, run_service

if __name__ == "__main__":
    gc.set_threshold(*GARBAGE)
    map_large_blocks()
    run_service("gateway", GatewayInstance.build, uvloop.new_event_loop)
