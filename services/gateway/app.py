"""What agents talk to: the chat APIs in bare ASGI, everything else through FastAPI."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import orjson
from fastapi import FastAPI

from atoll.gateway.apis.base import Api, ApiRequest
from atoll.gateway.apis.client_rules import apply_rules
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.conversation import ChatAnswer, RequestError
from atoll.gateway.http_server import BoundedConnection, Receive, Scope, Send, bearer_key, header
from atoll.gateway.sessions import AskedTurn, Session, Sessions
from atoll.gateway.turns import Turns
from atoll.wire.types import TurnRecord

log = logging.getLogger(__name__)

BODY_TIMEOUT_S: Final = 60.0  # for a request's body to arrive
KEEP_ALIVE_S: Final = 3.0  # silence in a stream before a sign of life; errors before it have their own status
UNREAD: Final = (401, 403, 408, 413, 503)  # may be answered before the body is there
MAX_BUFFERED_BODIES: Final = 8  # of the largest size, read at the same time

JSON_HEADERS: Final = [(b"content-type", b"application/json")]
STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class GatewayApp:
    """An ASGI application."""

    def __init__(
        self,
        apis: Mapping[str, Api],
        counting: Mapping[str, Api],
        control: FastAPI,
        sessions: Sessions,
        turns: Turns,
        *,
        rules: frozenset[str],
        max_body_bytes: int,
    ) -> None:
        """`apis`: by path, of requests that are answered with a turn; `counting`: with the length of their
        context."""
        self._apis = apis
        self._counting = counting
        self._control = control
        self._sessions = sessions
        self._turns = turns
        self._rules = rules
        self._max_body_bytes = max_body_bytes
        self._buffered = 0  # bytes of bodies that are being read, or may be

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        api = self._apis.get(path) or self._counting.get(path)
        if api is None or scope["method"] != "POST":
            await self._control(scope, receive, send)
            return
        try:
            await self._serve(api, scope, receive, send)
        except RequestError as error:
            await _respond(send, error.status, orjson.dumps(api.error(error)))
        except Exception:
            log.exception("POST %s", path)
            failure = RequestError(500, "internal", "the gateway failed; its log has the traceback")
            await _respond(send, failure.status, orjson.dumps(api.error(failure)))

    async def _serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        session = await self._sessions.of_agent(bearer_key(scope))
        content = await self._read_body(scope, receive)
        if content is None:
            return  # the client left
        request = self._apply_rules(api.parse(parse_json(content)))
        if scope["path"] in self._counting:
            num_tokens = await self._turns.count(session, request.chat)
            await _respond(send, 200, orjson.dumps({"input_tokens": num_tokens}))
            return
        body = hashlib.blake2b(scope["path"].encode() + content, digest_size=16).digest()
        asked = self._turns.ask(session, body, request.chat)
        await asyncio.wait([asked.record], timeout=KEEP_ALIVE_S)
        if request.stream:
            await self._stream(api, request, session, asked, send)
        else:
            record = await self._turns.result(asked)
            answer = self._answer(session, record, request)
            await _respond(send, 200, orjson.dumps(api.answer(request, answer)))
        connection: BoundedConnection = scope["connection"]
        if await connection.has_delivered(partial(self._turns.note_undelivered, session, body, asked)):
            self._turns.note_delivered(session, body, asked)

    async def _stream(
        self, api: Api, request: ApiRequest, session: Session, asked: AskedTurn, send: Send
    ) -> None:
        """The turn is generated whole and streamed afterwards, with signs of life meanwhile."""
        if asked.record.done():
            await self._turns.result(asked)  # an error still has a status of its own
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while not asked.record.done():
            await _send_part(send, api.keep_alive)
            await asyncio.wait([asked.record], timeout=KEEP_ALIVE_S)
        try:
            record = await self._turns.result(asked)
        except RequestError as error:
            await _send_part(send, api.error_event(error), more=False)
            return
        *events, last = api.events(request, self._answer(session, record, request))
        await _send_part(send, b"".join(events))
        await _send_part(send, last, more=False)

    def _answer(self, session: Session, record: TurnRecord, request: ApiRequest) -> ChatAnswer:
        return self._turns.answer(session, record, request.chat, request.model)

    def _apply_rules(self, request: ApiRequest) -> ApiRequest:
        messages, applied = apply_rules(self._rules, request.chat.messages)
        for rule in applied:
            self._sessions.counters[f"rule: {rule}"] += 1
        return replace(request, chat=replace(request.chat, messages=messages)) if applied else request

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None: the client left before its end. Raises RequestError for one that is too large or too slow,
        and while too many large ones are being read."""
        limit = self._max_body_bytes
        length = int(header(scope, b"content-length") or limit)
        if length > limit:
            raise RequestError(413, "too_large", f"a body of {length:,} bytes, expected at most {limit:,}")
        if self._buffered + length > MAX_BUFFERED_BODIES * limit:
            raise RequestError(503, "unavailable", "too many large requests at once; try again")
        self._buffered += length
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await _receive_all(receive, limit)
        except TimeoutError:
            raise RequestError(
                408, "invalid_request", f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._buffered -= length


async def _receive_all(receive: Receive, limit: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message["body"])
        size += len(message["body"])
        if size > limit:
            raise RequestError(
                413, "too_large", f"a body of more than {limit:,} bytes, expected at most that"
            )
        if not message["more_body"]:
            return b"".join(parts)


async def _respond(send: Send, status: int, content: bytes) -> None:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(content))]
    if status in UNREAD:
        headers.append((b"connection", b"close"))  # what is left of the body is not waited for
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_part(send: Send, content: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": more})
