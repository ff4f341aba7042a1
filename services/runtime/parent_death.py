"""Starts programs that the kernel kills with their parent, even if the parent gets SIGKILL (Linux).

`subprocess` could do this in a `preexec_fn`, but Python code between fork and exec can hang for ever
where the parent has threads, as every process with gRPC has.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on this process gets SIGKILL when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def with_parent_death(*command: str) -> list[str]:
    """The command line that runs `command` so; start it from a thread that lives on."""
    return [sys.executable, "-S", __file__, *command]


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
