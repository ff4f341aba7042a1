"""Reserved ports, for servers that cannot report a port of their own choice."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_port() -> Iterator[int]:
    """A loopback port that Linux does not hand out as "any free port", but that can be bound explicitly.

    So does a socket that is bound and does not listen, where both it and the server that comes have
    SO_REUSEADDR set, as PyTorch's rendezvous, asyncio's servers and SGLang have.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
