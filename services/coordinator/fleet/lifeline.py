"""An idle TCP connection to a service, which breaks when its process or its host is gone."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

CONNECT_S: Final = 1.0
RETRY_S: Final = 1.0  # between two attempts to reach a host, or to hold a connection that breaks at once
# A host has a second to answer the kernel's probe, which follows a second of silence.
KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 1}


class Lifeline:
    """Notices at once that a process has ended, and within two seconds that its host does not answer.

    The kernels of both ends keep the connection, so it survives while either process is suspended. Nothing is
    sent over it. gRPC closes such a connection after two minutes; it is opened again.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._peer = host.strip("[]"), int(port)
        self._was_held = False
        self.held = asyncio.Event()  # set while there is a connection

    async def wait_for_loss(self, is_patient: Callable[[], bool]) -> str:
        """Returns why the service is lost: its address refuses connections, or its host does not answer and
        `is_patient` is false. Waits until the connection ends, then for a new one; unblocked by the kernel.
        """
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self._hold()
            except ConnectionRefusedError:
                return "it refuses connections: its process has ended"
            except OSError as error:  # also a timeout, or a name that its container has taken along
                if self._was_held and not is_patient():
                    return f"its host does not answer: {str(error) or 'timeout'}"
            await asyncio.sleep(max(0.0, begun + RETRY_S - loop.time()))

    async def _hold(self) -> None:
        """Returns when the process at the other end closes the connection. Raises OSError if there is
        none, or if the other host is gone."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(*self._peer)
        try:
            peer = writer.get_extra_info("peername")
            if peer is None:
                return  # its process ended as soon as the connection was there
            self._peer = peer[:2]  # a lost container's name would fail slowly
            if self._peer == writer.get_extra_info("sockname")[:2]:
                raise ConnectionRefusedError  # a port that nobody holds may be connected to itself
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            self.held.set()
            self._was_held = True
            with suppress(ConnectionError):  # its process has closed it; other errors are the host's
                if await reader.read(4096):  # HTTP/2's greeting
                    # its goodbye: a server that stops waits for all connections to close
                    await reader.read(4096)
        finally:
            self.held.clear()
            writer.close()
