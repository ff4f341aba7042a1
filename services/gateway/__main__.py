"""`python -m atoll.gateway`: one gateway instance."""

import ctypes
import gc

import uvloop

from atoll.gateway.instance import GatewayInstance
from atoll.runtime.process import GARBAGE, run_service

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE_BLOCK = 1 << 20  # bytes

if __name__ == "__main__":
    gc.set_threshold(*GARBAGE)
    # Bodies may have many megabytes: such blocks return to the system instead of leaving holes in the heap.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    run_service("gateway", GatewayInstance.build, uvloop.new_event_loop)
