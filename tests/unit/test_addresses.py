"""Where registered servers may be, however their URL says it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import grpc.aio
import pytest

from atoll.external.addresses import AddressPolicy, is_loopback
from atoll.external.protocols import connect
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc
from tests.http_servers import Request, raw_http, reply
from tests.openenv_server import openenv_server


def server(url: str) -> ExternalServer:
    return ExternalServer("reward", "judge", url, "http", timeout_s=5.0)


async def listening() -> tuple[asyncio.Server, int]:
    one = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    return one, one.sockets[0].getsockname()[1]


def known(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """What every name leads to."""

    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518"),
        *("[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]"),
        *("[fe80::1]", "0.0.0.0", "0", "[::]", "224.0.0.1", "[ff02::1]", "168.63.129.16", "192.0.0.192"),
    ],
)
async def test_addresses_that_no_server_has_are_refused_whatever_is_listed(host: str) -> None:
    everything = AddressPolicy([ip_network("0.0.0.0/0"), ip_network("::/0")], loopback=True)
    for addresses in (AddressPolicy(), everything):
        with pytest.raises(UserError, match="metadata addresses are never called"):
            await addresses.locate(server(f"http://{host}/"))


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "172.16.5.4", "192.168.1.1", "100.64.0.1", "240.0.0.1", "[fd00::1]", "[fec0::1]"]
)
async def test_a_private_network_is_called_only_if_the_runs_file_lists_it(host: str) -> None:
    with pytest.raises(UserError, match=r"must be listed in coordinator\.server_networks"):
        await AddressPolicy([ip_network("10.1.0.0/16")], loopback=True).locate(server(f"http://{host}/"))
    AddressPolicy([ip_network("10.0.0.0/16")]).check(server("there:1"), "10.0.0.1")
    AddressPolicy([ip_network("10.0.0.0/16")]).check(server("there:1"), "::ffff:10.0.0.1")
    AddressPolicy([ip_network("fd00::/64")]).check(server("there:1"), "fd00::1")
    AddressPolicy().check(server("there:1"), "8.8.8.8")
    AddressPolicy().check(server("there:1"), "2600::1")


async def test_loopback_is_called_by_a_coordinator_that_listens_there() -> None:
    one, port = await listening()
    async with one:
        for host in ("127.0.0.1", "localhost", "2130706433", "127.1", "[::ffff:127.0.0.1]"):
            url = f"http://{host}:{port}/grade"
            with pytest.raises(UserError, match="only if the coordinator itself listens on loopback"):
                await AddressPolicy().locate(server(url))
            address = await AddressPolicy(loopback=True).locate(server(url))
            assert address.removeprefix("::ffff:") == "127.0.0.1"
        assert await AddressPolicy(loopback=True).locate(server(f"127.0.0.1:{port}")) == "127.0.0.1"
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "node7", "10.0.0.1")] == [False] * 3


async def test_of_a_name_with_several_addresses_all_have_to_pass_and_one_that_answers_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, port = await listening()
    judge = server(f"http://judge.example:{port}")
    async with one:
        known(monkeypatch, "127.0.0.1", "169.254.169.254")
        with pytest.raises(UserError, match="never called"):
            await AddressPolicy(loopback=True).locate(judge)
        known(monkeypatch, "::1", "127.0.0.1")
        assert await AddressPolicy(loopback=True).locate(judge) == "127.0.0.1"
    with pytest.raises(UserError, match="connection refused"):
        await AddressPolicy(loopback=True).locate(judge)


@pytest.mark.parametrize(
    "url", ["unix:socket:1", "unix-abstract:name:1", "dns:///host:1", "http://[::1", "host", "host:99999"]
)
async def test_what_is_no_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="expected a url with host and port"):
        await AddressPolicy(loopback=True).locate(server(url))


async def test_a_name_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    with pytest.raises(UserError, match="its host cannot be resolved"):
        await AddressPolicy().locate(server("http://nowhere.example/"))


def elsewhere(url: str) -> str:
    """With a host that no name server knows: who looks it up again cannot connect."""
    return url.replace("127.0.0.1", "judge.invalid")


async def test_http_goes_to_the_checked_address_whatever_the_name_says_by_then() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield reply({"verdicts": [{"value": 1.0}]})

    async with raw_http(answer) as raw:
        url = elsewhere(raw.url)
        judge = connect(replace(server(url), address="127.0.0.1"), "secret")
        assert await judge.probe() == "preset plain: graded the probe 1"
        await judge.close()
    (request,) = raw.requests
    assert request.headers["host"] == url.removeprefix("http://")


async def test_a_websocket_goes_to_the_checked_address() -> None:
    async with openenv_server("secret") as (url, _):
        theirs = ExternalServer("env", "theirs", elsewhere(url), "openenv", address="127.0.0.1")
        client = connect(theirs, "secret")
        assert await client.probe() == "actions of metadata, answer"
        await client.close()


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")])
async def test_grpc_goes_to_the_checked_address(host: str, address: str) -> None:
    class Theirs(reward_pb2_grpc.RewardServicer):
        async def Describe(self, request, context):  # type: ignore[no-untyped-def] # noqa: N802
            return reward_pb2.DescribeReply(graders=["theirs"])

    running = grpc.aio.server()
    reward_pb2_grpc.add_RewardServicer_to_server(Theirs(), running)
    port = running.add_insecure_port(f"{host}:0")
    await running.start()
    theirs = ExternalServer("reward", "judge", f"grpc://judge.invalid:{port}", "grpc", address=address)
    client = connect(theirs, None)
    assert await client.probe() == "graders theirs"
    await client.close()
    await running.stop(None)
