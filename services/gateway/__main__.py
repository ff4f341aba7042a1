"""`python -m atoll.gateway`: one gateway instance."""

import uvloop

from atoll.gateway.instance import GatewayInstance
from atoll.runtime.process import run_service

if __name__ == "__main__":
    run_service("gateway", GatewayInstance.build, uvloop.new_event_loop)
