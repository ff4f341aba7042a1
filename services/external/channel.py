"""HTTP with external servers: bounded in time, size and concurrency."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx2
from pydantic import TypeAdapter

from atoll.external.base import MAX_ANSWER_BYTES, Json
from atoll.external.responses import RefusedError, excerpt, parse_response, redact
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.types import ExternalServer

T = TypeVar("T")


class Channel:
    """The connections to one server, and slots that limit concurrency."""

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        """Raises UserError if the URL is not HTTP, or contains more than host, port and path."""
        self.server = server
        self.where = str(server)
        self.token = token
        self._url = _check_url(server)
        self.http = httpx2.AsyncClient(
            transport=_GuardedTransport(server, token),
            headers={"accept-encoding": "identity"} | bearer(token),
            cookies=CookieJar(
                DefaultCookiePolicy(allowed_domains=[])
            ),  # sessions belong to items, not to the client
            timeout=None,  # `call` bounds the whole call, also if bytes trickle in
        )
        self.slots = asyncio.Semaphore(server.concurrency)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Waits for one of `server.concurrency` slots; the body has `server.timeout_s`."""
        async with self.slots, self.deadline():
            yield

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.server.timeout_s):
                yield
        except TimeoutError:
            raise ServiceUnavailableError(
                f"{self.where}: no answer within {self.server.timeout_s:g} s"
            ) from None
        except httpx2.HTTPError as error:
            reason = redact(str(error), self.token) or type(error).__name__
            raise ServiceUnavailableError(f"{self.where}: the connection failed: {reason}") from None

    def address(self, path: str) -> str:
        """URL of `path` on the server; without a path, the URL as registered."""
        return self._url.rstrip("/") + path if path else self._url

    def websocket_arguments(self) -> dict[str, Any]:
        """Keyword arguments to open a WebSocket at the checked address."""
        return {"host": self.server.address} if self.server.address else {}

    async def post(
        self, path: str, body: Json, answer: TypeAdapter[T], cookies: httpx2.Cookies | None = None
    ) -> T:
        """The validated response to one POST, which takes a slot. `cookies` are sent and updated."""
        headers = {"content-type": "application/json"}
        if cookies:
            headers["cookie"] = "; ".join(f"{cookie.name}={cookie.value}" for cookie in cookies.jar)
        return await self._ask("POST", path, json.dumps(body), headers, answer, cookies)

    async def get(self, path: str, answer: TypeAdapter[T]) -> T:
        return await self._ask("GET", path, None, {}, answer, None)

    async def status(self, path: str, content: str) -> int:
        """Status of the response to a POST of `content`, which need not be JSON."""
        async with self.call():
            headers = {"content-type": "application/json"}
            return (await self.http.post(self.address(path), content=content, headers=headers)).status_code

    async def close(self) -> None:
        await self.http.aclose()

    async def _ask(
        self,
        method: str,
        path: str,
        content: str | None,
        headers: dict[str, str],
        answer: TypeAdapter[T],
        cookies: httpx2.Cookies | None,
    ) -> T:
        async with self.call():
            response = await self.http.request(method, self.address(path), content=content, headers=headers)
        where = f"{self.where}: {method} {path}".rstrip()
        if not response.is_success:
            understood = response.status_code in (400, 422)
            raise (RefusedError if understood else ProtocolError)(
                f"{where}: got status {response.status_code} and {excerpt(response.content, self.token)}, "
                "expected 200"
            )
        kind = response.headers.get("content-type", "none").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ProtocolError(
                f"{where}: got content type {excerpt(kind, self.token)}, expected application/json; the "
                f"response was {excerpt(response.content, self.token)}"
            )
        if cookies is not None:
            cookies.extract_cookies(response)
        return parse_response(where, response.content, answer, self.token)


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def status_error(where: str, status: int, headers: Mapping[str, str], token: str | None) -> AtollError | None:
    """The error for an HTTP status, in any protocol over HTTP; None for success."""
    got = f"{where}: got status {status}"
    if 300 <= status < 400:
        target = excerpt(headers.get("location", "").partition("?")[0], token)
        return ProtocolError(f"{got}, a redirect to {target}, which is not followed: register that URL")
    if status in (401, 403):
        had = "the server rejects the token of `auth`" if token else "the server requires a token: set `auth`"
        return UserError(f"{got}: {had}")
    if status == 429 or (status == 503 and "retry-after" in headers):
        wait = excerpt(headers.get("retry-after", "a while"), token)
        return OverloadedError(f"{got}: the server is busy and asks to retry after {wait}")
    if status >= 500:
        return ServiceUnavailableError(f"{got}: the server failed; see its log")
    return None


class _GuardedTransport(httpx2.AsyncBaseTransport):
    """Transport that rejects responses that no protocol here supports."""

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self._where = str(server)
        self._token = token
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=server.concurrency)
        self._address = server.address
        self._transport = httpx2.AsyncHTTPTransport(verify=_authorities(), limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._address:  # the Host header is set already and keeps the name
            request.extensions = {**request.extensions, "sni_hostname": request.url.host}
            request.url = request.url.copy_with(host=self._address)
        response = await self._transport.handle_async_request(request)
        failed = status_error(self._where, response.status_code, response.headers, self._token)
        packing = response.headers.get("content-encoding", "identity")
        if not failed and packing != "identity":
            failed = ProtocolError(
                f"{self._where}: got a response with content encoding {packing!r}, expected none"
            )
        if failed:
            await response.aclose()
            raise failed
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, response.extensions["network_stream"], self._where)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


@cache
def _authorities() -> ssl.SSLContext:
    """Cached, since reading them takes longer than a call. Ignores the environment's overrides."""
    return httpx2.create_ssl_context(trust_env=False)


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's body of bounded size. If the server sent more than one response, the connection is closed:
    the next request would take the rest as its own response."""

    def __init__(self, stream: httpx2.AsyncByteStream, connection: Any, where: str) -> None:
        self._stream = stream
        self._connection = connection
        self._where = where

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise ProtocolError(
                    f"{self._where}: got a response of more than {MAX_ANSWER_BYTES:,} bytes, expected less"
                )
            yield chunk

    async def aclose(self) -> None:
        if _has_unread_bytes(self._stream):
            await self._connection.aclose()  # before the pool may hand it to another request
        await self._stream.aclose()


def _has_unread_bytes(stream: Any) -> bool:
    """Whether bytes beyond this response have arrived. httpcore2 keeps them in its parser, without a public
    name; bytes that arrive later it notices itself, before it uses the connection again."""
    unread, _ = stream._httpcore_stream._stream._connection._h11_state.trailing_data
    return bool(unread)


def _check_url(server: ExternalServer) -> str:
    """URLs are logged, so they must not contain secrets."""
    try:
        url = httpx2.URL(server.url)
    except httpx2.InvalidURL as error:
        raise UserError(f"{server.kind} server {server.name}: invalid url: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise UserError(
            f'{server.kind} server {server.name}: expected url = "http(s)://HOST[:PORT][/PATH]" without '
            "user, query or fragment; put a token into `auth`"
        )
    return str(url)
