"""Ports for servers that cannot say which free one they took."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of loopback that Linux gives to nobody who asks for any free one; who asks for this one gets it.

    So does a socket that is bound and does not listen, where both it and the server that comes have
    SO_REUSEADDR set, as PyTorch's rendezvous, asyncio's servers and SGLang have.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
