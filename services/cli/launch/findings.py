"""Findings of `atoll doctor` and of the checks before a run."""

import socket
from dataclasses import dataclass
from enum import Enum

CONNECT_TIMEOUT_S = 10.0
LOOPBACK_ADVICE = "bring the loopback device up (ip link set lo up), and let this user listen on 127.0.0.1"


class FindingState(Enum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    found: str
    state: FindingState = FindingState.OK
    advice: str = ""


def loopback() -> Finding:
    """Services talk over ports of 127.0.0.1 chosen by the system."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
            return Finding("loopback", f"port {address[1]} could be opened")
    except OSError as error:
        return Finding("loopback", str(error), FindingState.MISSING, LOOPBACK_ADVICE)
