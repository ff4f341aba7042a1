"""Collective transports: rounds, epochs, deadlines, aborts, over tcp, which shares its protocol with NCCL.
Senders and members are threads here."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from atoll.runtime.errors import WeightPushError
from atoll.weights.transport import tcp
from atoll.weights.transport.collective import BroadcastReceiver, BroadcastSender
from atoll.wire.types import Membership, StreamManifest

LONG_S, SHORT_S = 20.0, 0.2  # a deadline that no test reaches, and one that tests wait for
PAIR = Membership(epoch=1, num_members=2)


def manifest(sent: tuple[str, int], num_bytes: int) -> StreamManifest:
    return StreamManifest(5, *sent, num_bytes, "plan", part=0, checksum=0)


def payload(seed: int, num_bytes: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send(sender: BroadcastSender, part: int, data: torch.Tensor, target: int = 0) -> StreamManifest:
    sender.room(part)[: len(data)] = data
    return manifest(sender.send(part, target, len(data)), len(data))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def take(
    threads: ThreadPoolExecutor,
    receiver: BroadcastReceiver,
    stream: StreamManifest,
    of: Membership,
    member: int,
) -> Future[torch.Tensor]:
    return threads.submit(lambda: receiver.take(stream, replace(of, member=member)).clone())


def test_parts_reach_all_members_in_order(threads):
    sizes = [1000, 7, 3 << 20, 64]
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", sizes)) as sender:
        receivers = [tcp.open_receiver(LONG_S) for _ in range(2)]
        sender.begin(PAIR)
        for part, size in enumerate(sizes):
            stream = send(sender, part, payload(part, size))
            for got in [take(threads, r, stream, PAIR, m) for m, r in enumerate(receivers)]:
                assert torch.equal(got.result(), payload(part, size))
        assert stream.offset == 1000 + 7 + (3 << 20)  # one communicator carried them all
        for receiver in receivers:
            receiver.close()


def test_two_parts_are_packed_before_anyone_listens(threads):
    """The third waits for the first one's bucket."""
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8, 8, 8])) as sender:
        alone, receiver = Membership(1, 1), tcp.open_receiver(LONG_S)
        sender.begin(alone)
        streams = [send(sender, part, payload(part, 8)) for part in range(2)]
        third = threads.submit(send, sender, 2, payload(2, 8))
        assert not third.done()
        assert torch.equal(receiver.take(streams[0], alone), payload(0, 8))
        streams.append(third.result())
        for part in (1, 2):
            assert torch.equal(receiver.take(streams[part], alone), payload(part, 8))
        receiver.close()


def test_target_ranks_have_communicators_of_their_own(threads):
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8, 8])) as sender:
        receivers = [tcp.open_receiver(LONG_S) for _ in range(2)]  # ranks 0 and 1 of one replica
        alone = Membership(1, 1)
        sender.begin(alone)
        streams = [send(sender, rank, payload(rank, 8), target=rank) for rank in range(2)]
        assert streams[0].location != streams[1].location
        for rank in range(2):
            assert torch.equal(receivers[rank].take(streams[rank], alone), payload(rank, 8))
            receivers[rank].close()


def test_missing_member_is_named_at_the_deadline(threads):
    three = Membership(1, 3)
    source = tcp.TcpRoot("127.0.0.1", SHORT_S, three)
    there = tcp.TcpMember(
        LONG_S, source.location, replace(three, member=1)
    )  # before the deadline starts to count
    got = threads.submit(there.broadcast, payload(1, 8))
    with pytest.raises(WeightPushError, match=r"member 0, 2 of 3 in epoch 1 did not connect within 0\.2 s"):
        source.broadcast(payload(0, 8))
    with pytest.raises(WeightPushError, match="8 of 8 bytes did not arrive"):
        got.result()  # although its own deadline is long: the communicator was closed
    with pytest.raises(WeightPushError, match="cannot reach 127"):
        tcp.TcpMember(LONG_S, source.location, three)


def connect(stream: StreamManifest, epoch: int, member: int, secret: bytes | None = None) -> socket.socket:
    """A member's socket, which greets but reads nothing."""
    address, _, known = stream.location.partition("#")
    connection = socket.socket()
    connection.settimeout(LONG_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    connection.sendall(tcp.HELLO.pack(secret or bytes.fromhex(known), epoch, member))
    return connection


SOCKET_BYTES = 8 << 20  # more than the buffers of the sender's socket and `connect`'s


def test_slow_member_is_named_and_the_others_have_the_part(threads):
    with closing(tcp.open_sender(1.5, "127.0.0.1", [SOCKET_BYTES, 8, 8])) as sender:
        sender.begin(PAIR)
        stream = send(sender, 0, payload(0, SOCKET_BYTES))
        receiver = tcp.open_receiver(LONG_S)
        with connect(stream, epoch=1, member=1):
            got = take(threads, receiver, stream, PAIR, member=0)
            assert torch.equal(got.result(), payload(0, SOCKET_BYTES))
            send(sender, 1, payload(1, 8))
            with pytest.raises(WeightPushError, match=r"member 1 of 2 in epoch 1 did not read within 1\.5 s"):
                sender.room(2)
        receiver.close()


def test_dead_member_is_named_at_once(threads):
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [SOCKET_BYTES, 8, 8])) as sender:
        sender.begin(PAIR)
        stream = send(sender, 0, payload(0, SOCKET_BYTES))
        send(sender, 1, payload(1, 8))
        connect(stream, epoch=1, member=1).close()
        got = take(threads, tcp.open_receiver(LONG_S), stream, PAIR, member=0)
        with pytest.raises(WeightPushError, match=r"member 1 of 2 in epoch 1 has left"):
            sender.room(2)
        with pytest.raises(WeightPushError, match="the epoch is over"):
            got.result()


@pytest.mark.parametrize("greeted", [True, False])  # the end of a connection, and its reset
def test_a_sender_that_is_gone_ends_the_epoch(greeted):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = tcp.TcpMember(LONG_S, f"127.0.0.1:{listener.getsockname()[1]}#{bytes(16).hex()}", PAIR)
        if greeted:
            connection, _ = listener.accept()
            with connection:
                assert len(connection.recv(tcp.HELLO.size, socket.MSG_WAITALL)) == tcp.HELLO.size
    with pytest.raises(WeightPushError, match=r"8 of 8 bytes did not arrive \(.*\): the epoch is over"):
        target.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_strangers_are_turned_away(threads, monkeypatch):
    """One without the secret, one for another epoch, two with invalid member numbers, a second one with a
    member's number, one that sends nothing. The listener accepts connections in order."""
    monkeypatch.setattr(tcp, "HELLO_S", LONG_S)
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8])) as sender:
        sender.begin(PAIR)
        stream = send(sender, 0, payload(0, 8))
        port = int(stream.location.partition("#")[0].rpartition(":")[2])

        def is_turned_away(stranger: socket.socket) -> bool:
            with stranger:
                return stranger.recv(1) == b""  # closed without a byte of the weights

        with connect(stream, epoch=1, member=0) as member:
            assert is_turned_away(connect(stream, 1, 1, secret=b"0" * 16))
            for epoch, number in ((0, 1), (1, 2), (1, -1), (1, 0)):
                assert is_turned_away(connect(stream, epoch, number))
            monkeypatch.setattr(tcp, "HELLO_S", 0.1)  # only for this one: greetings may be slow
            assert is_turned_away(socket.create_connection(("127.0.0.1", port), timeout=LONG_S))
            monkeypatch.setattr(tcp, "HELLO_S", LONG_S)
            with closing(tcp.open_receiver(LONG_S)) as receiver:
                got = take(threads, receiver, stream, PAIR, member=1)
                assert torch.equal(got.result(), payload(0, 8))
            assert member.recv(8) == payload(0, 8).numpy().tobytes()


def test_a_new_epoch_ends_the_old_one_at_once(threads):
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8])) as sender:
        sender.begin(PAIR)  # member 1 died before it connected
        receiver = tcp.open_receiver(LONG_S)
        old = send(sender, 0, payload(0, 8))
        got = take(threads, receiver, old, PAIR, member=0)
        started, alone = time.monotonic(), Membership(2, 1)
        sender.begin(alone)
        with pytest.raises(WeightPushError, match=r"the epoch (is|may be) over"):
            got.result()
        assert time.monotonic() - started < LONG_S / 2  # not at a deadline
        new = send(sender, 0, payload(1, 8))
        assert torch.equal(receiver.take(new, alone), payload(1, 8))
        with pytest.raises(WeightPushError, match="for epoch 1, but epoch 2 has begun: it is void"):
            receiver.take(old, PAIR)
        with pytest.raises(WeightPushError, match="a push to epoch 1, but epoch 2 has begun"):
            sender.begin(PAIR)
        receiver.close()


def test_repeated_and_skipped_parts():
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8, 8, 8])) as sender:
        alone, receiver = Membership(1, 1), tcp.open_receiver(LONG_S)
        sender.begin(alone)
        first = send(sender, 0, payload(0, 8))
        for _ in range(2):  # a call whose answer was lost is repeated
            assert torch.equal(receiver.take(first, alone), payload(0, 8))
        send(sender, 1, payload(1, 8))
        third = send(sender, 2, payload(2, 8))
        with pytest.raises(WeightPushError, match="its part begins at byte 16, but 8 bytes were received"):
            receiver.take(third, alone)
        receiver.close()


def test_silent_sender_is_named_at_the_deadline():
    with closing(tcp.open_sender(LONG_S, "127.0.0.1", [8])) as sender:
        receiver = tcp.open_receiver(SHORT_S)
        sender.begin(PAIR)
        stream = send(sender, 0, payload(0, 8))
        with pytest.raises(WeightPushError, match=r"from trainer rank 5: 8 of 8 bytes .* within 0\.2 s"):
            receiver.take(stream, PAIR)
