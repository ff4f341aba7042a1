"""Checks addresses of registered servers: nobody gains access through the coordinator to hosts that they
cannot reach themselves. Servers in the run's config are not checked.

A name may resolve to a different address at each look-up. So it is resolved once, all its addresses are
checked, and all calls go to one of them: `ExternalServer.address`.
"""

import asyncio
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import urlsplit

from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_PORTS: Final = {"http": 80, "https": 443}
_NAT64: Final = IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
_SITE_LOCAL: Final = IPv6Network("fec0::/10")  # deprecated; Python treats only fc00::/7 as private
# Machine-local cloud services at addresses that look public: Azure, Oracle.
_CLOUDS: Final = {ip_address("168.63.129.16"), ip_address("192.0.0.192")}


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    networks: Collection[Network] = ()  # private networks that servers may be in
    loopback: bool = False

    async def locate(self, server: ExternalServer) -> str:
        """The address to call it at. Raises UserError if one of its addresses is refused, or none accepts
        connections.
        """
        host, port = _place(server)
        try:
            async with asyncio.timeout(server.timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # a TimeoutError is an OSError
            raise UserError(f"{server}: its host cannot be resolved; check url") from None
        addresses = [str(place[0]) for *_, place in found]
        for address in addresses:
            self.check(server, address)
        for address in addresses:
            with suppress(OSError):
                async with asyncio.timeout(server.timeout_s / len(addresses)):
                    _, writer = await asyncio.open_connection(address, port)
                writer.close()
                return address
        raise UserError(f"{server}: connection refused; start it first")

    def check(self, server: ExternalServer, address: str) -> None:
        """Raises UserError if servers may not be there."""
        place = _effective_address(ip_address(address))
        problem = None
        if place.is_link_local or place.is_multicast or place.is_unspecified or place in _CLOUDS:
            problem = "link-local, multicast, unspecified and metadata addresses are never called"
        elif any(place in network for network in self.networks):
            problem = None
        elif place.is_loopback and not self.loopback:
            problem = "loopback is allowed only if the coordinator itself listens on loopback"
        elif not (place.is_loopback or (place.is_global and not place.is_reserved)) or place in _SITE_LOCAL:
            problem = "private networks must be listed in coordinator.server_networks of the run's config"
        if problem:
            raise UserError(f"{server} cannot be registered: {problem}")


def _place(server: ExternalServer) -> tuple[str, int]:
    with suppress(ValueError):  # of what is no URL, or no port
        url = urlsplit(server.url if "://" in server.url else f"//{server.url}")
        port = url.port or _PORTS.get(url.scheme)
        if url.hostname and port:
            return url.hostname, port
    raise UserError(f"{server}: expected a url with host and port, such as http://HOST:PORT or HOST:PORT")


def _effective_address(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address, if any."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
