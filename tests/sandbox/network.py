"""Attacks over sockets. The host listens at every address that they try, and must not receive anything."""

import ctypes
import os
import socket

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import attempts, libc

ENDS: dict[str, set[ProgramStatus]] = {}


def tcp_to_loopback(host):
    return attempts((socket.create_connection, ("127.0.0.1", host["tcp"]), 1))


def tcp_over_ipv6(host):
    return attempts((socket.create_connection, ("::1", host["tcp"]), 1))


def tcp_without_connect(host):
    channel = socket.socket()
    return channel.sendto(b"hello", 0x20000000, ("127.0.0.1", host["tcp"]))  # MSG_FASTOPEN


def metadata_server(host):
    return attempts((socket.create_connection, ("169.254.169.254", 80), 0.3))


def udp(host):
    channel = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return channel.sendto(b"hello", ("127.0.0.1", host["udp"]))


def listen(host):
    server = socket.create_server(("127.0.0.1", 0))
    return server.getsockname()


def names(host):
    socket.setdefaulttimeout(0.5)
    return attempts((socket.getaddrinfo, "example.com", 80), (socket.gethostbyname, "example.com"))


def urllib(host):
    from urllib.request import urlopen

    return attempts((urlopen, f"http://127.0.0.1:{host['tcp']}", None, 1))


def unix_path(host):
    channel = socket.socket(socket.AF_UNIX)
    return attempts((channel.connect, host["unix"]))


def unix_abstract(host):
    channel = socket.socket(socket.AF_UNIX)
    return attempts((channel.connect, "\0" + host["abstract"]))


def unix_listen(host):
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0atoll-attack")
    return server


def unix_datagram_from_a_pair(host):
    # a pair of datagram sockets needs no socket() and may send to any name
    channel, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return attempts(
        (channel.sendto, b"hello", host["datagram"]), (channel.sendto, b"hello", "\0" + host["abstract"])
    )


def unix_message_from_a_pair(host):
    channel, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return attempts(
        (channel.sendmsg, [b"hello"], [], 0, host["datagram"]),
        (channel.sendmsg, [b"hello"], [], 0, "\0" + host["abstract_datagram"]),
    )


def unix_connect_of_a_pair(host):
    kinds = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET

    def connect(kind, name):
        channel, _ = socket.socketpair(socket.AF_UNIX, kind)
        channel.connect(name)

    return attempts(
        *(
            (connect, kind, name)
            for kind in kinds
            for name in (host["unix"], host["datagram"], "\0" + host["abstract"])
        )
    )


def unix_bind_of_a_pair(host):
    channel, _ = socket.socketpair()
    return attempts((channel.bind, "\0atoll-attack"), (channel.bind, "socket"), (channel.listen,))


def pairs_of_other_families(host):
    def pair(family, kind):
        ends = (ctypes.c_int * 2)()
        if libc.socketpair(family, kind, 0, ends) == -1:
            raise OSError

    return attempts(*((pair, family, kind) for family in (2, 10, 30, 16) for kind in (1, 2, 5)))  # 30: TIPC


def netlink(host):
    return attempts(*((socket.socket, 16, socket.SOCK_RAW, protocol) for protocol in (0, 6, 12, 16)))


def vsock(host):
    channel = socket.socket(40, socket.SOCK_STREAM)
    return attempts((channel.connect, (2, 1024))) or "a socket to the hypervisor"


def kernel_crypto(host):
    return socket.socket(38, socket.SOCK_SEQPACKET)


def packets(host):
    return attempts(
        (socket.socket, 17, socket.SOCK_RAW, 0x0300),
        (socket.socket, 17, socket.SOCK_DGRAM, 0),
        (socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
        (socket.socket, socket.AF_INET, socket.SOCK_RAW, 255),
    )


def ping(host):
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)


def other_families(host):
    known = {socket.AF_UNIX, socket.AF_INET}
    return attempts(
        *((socket.socket, family, kind) for family in set(range(50)) - known for kind in (1, 2, 3, 5))
    )


def standard_streams_as_sockets(host):
    def connect(fd):
        channel = socket.socket(fileno=os.dup(fd))
        channel.connect(host["unix"])

    return attempts(*((connect, fd) for fd in range(4)))
