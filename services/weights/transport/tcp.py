"""Broadcasts over sockets, for hosts without NCCL: the sender listens, members connect, bytes follow.

Each communicator has its own port and secret: connections without the secret, or for another epoch, are
refused. The data is not encrypted, nor is gRPC: use a trusted network.
"""

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from atoll.runtime.errors import UserError, WeightPushError
from atoll.weights.transport import collective
from atoll.wire.types import Membership

HELLO = struct.Struct("<16sqi")  # secret, epoch, member
HELLO_S = 2.0  # how long a stranger that connects and sends nothing delays the others
CHUNK_BYTES = 1 << 20  # sent to one member at a time


def open_sender(deadline_s: float, host: str, part_bytes: Sequence[int]) -> collective.BroadcastSender:
    return collective.BroadcastSender(partial(TcpRoot, host, deadline_s), _allocate, part_bytes)


def open_receiver(deadline_s: float) -> collective.BroadcastReceiver:
    return collective.BroadcastReceiver(partial(TcpMember, deadline_s), _allocate)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)  # touches the pages


class TcpRoot:
    """See collective.RootCommunicator."""

    def __init__(self, host: str, deadline_s: float, membership: Membership) -> None:
        """Raises UserError if `host` is not an address of this machine."""
        self._deadline_s = deadline_s
        self._membership = membership
        self._secret = secrets.token_bytes(16)
        self._members: dict[int, socket.socket] = {}
        self._aborted = False
        try:
            self._listener = socket.create_server((host, 0), backlog=membership.num_members)
        except OSError as error:
            raise UserError(
                f"weights cannot be sent from {host} ({error}): give --host an address of this machine"
            ) from error
        reachable = socket.gethostname() if host == "0.0.0.0" else host
        self.location = f"{reachable}:{self._listener.getsockname()[1]}#{self._secret.hex()}"

    def broadcast(self, part: torch.Tensor) -> None:
        deadline = time.monotonic() + self._deadline_s
        try:
            self._accept_members(deadline)
            self._send(part.numpy().data, deadline)
        except (OSError, WeightPushError) as error:
            if self._aborted:
                raise WeightPushError(f"epoch {self._membership.epoch} is over") from error
            self.close()
            if isinstance(error, WeightPushError):
                raise
            raise WeightPushError(f"epoch {self._membership.epoch}: {error}") from error

    def abort(self) -> None:
        self._aborted = True
        for connection in (self._listener, *list(self._members.values())):
            with suppress(OSError):  # no longer connected
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def close(self) -> None:
        for connection in (self._listener, *self._members.values()):
            connection.close()

    def _accept_members(self, deadline: float) -> None:
        while len(self._members) < self._membership.num_members:
            self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = set(range(self._membership.num_members)) - self._members.keys()
                raise self._timeout_error("did not connect", missing) from None
            member = self._greet(connection)
            if member is None:
                connection.close()
            else:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._members[member] = connection

    def _greet(self, connection: socket.socket) -> int | None:
        """The member's number; None if the connection does not belong here."""
        connection.settimeout(HELLO_S)
        try:
            hello = connection.recv(HELLO.size)
        except OSError:
            return None
        if len(hello) < HELLO.size:
            return None
        secret, epoch, member = HELLO.unpack(hello)
        belongs = hmac.compare_digest(secret, self._secret) and epoch == self._membership.epoch
        expected = 0 <= member < self._membership.num_members and member not in self._members
        return member if belongs and expected else None

    def _send(self, part: memoryview, deadline: float) -> None:
        """Sends to all members concurrently, to each as fast as it reads."""
        if self._aborted:  # possibly before all members were known
            raise ConnectionAbortedError
        unsent = dict.fromkeys(self._members, part)
        with selectors.DefaultSelector() as selector:
            for member, connection in self._members.items():
                selector.register(connection, selectors.EVENT_WRITE, member)
            while any(len(rest) for rest in unsent.values()):
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise self._timeout_error("did not read", {m for m, rest in unsent.items() if len(rest)})
                for key, _ in ready:
                    try:
                        sent = self._members[key.data].send(unsent[key.data][:CHUNK_BYTES])
                    except OSError as error:
                        raise WeightPushError(
                            self._name_members({key.data}, f"has left ({error})")
                        ) from error
                    unsent[key.data] = unsent[key.data][sent:]
                    if not len(unsent[key.data]):
                        selector.unregister(key.fileobj)

    def _timeout_error(self, what: str, members: set[int]) -> WeightPushError:
        return WeightPushError(self._name_members(members, f"{what} within {self._deadline_s:g} s"))

    def _name_members(self, members: set[int], what: str) -> str:
        names = ", ".join(str(member) for member in sorted(members))
        return f"member {names} of {self._membership.num_members} in epoch {self._membership.epoch} {what}"


class TcpMember:
    """A member. See collective.Communicator."""

    def __init__(self, deadline_s: float, location: str, membership: Membership) -> None:
        """Raises WeightPushError if the sender is gone."""
        self._deadline_s = deadline_s
        address, _, secret = location.partition("#")
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), timeout=deadline_s)
            self._connection.sendall(HELLO.pack(bytes.fromhex(secret), membership.epoch, membership.member))
        except OSError as error:
            raise WeightPushError(f"cannot reach {address} ({error}): the epoch may be over") from error

    def broadcast(self, part: torch.Tensor) -> None:
        deadline = time.monotonic() + self._deadline_s
        missing = part.numpy().data
        try:
            while len(missing):
                self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._connection.recv_into(missing)
                if not received:
                    raise ConnectionResetError("closed by the sender")
                missing = missing[received:]
        except OSError as error:
            self.close()
            late = f"within {self._deadline_s:g} s"
            why = late if isinstance(error, TimeoutError) else f"({error}): the epoch is over"
            raise WeightPushError(f"{len(missing)} of {len(part)} bytes did not arrive {why}") from error

    def close(self) -> None:
        self._connection.close()
