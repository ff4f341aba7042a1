"""The HTTP interface for agents: chat APIs in plain ASGI, everything else with FastAPI."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import orjson
from fastapi import FastAPI

from atoll.gateway.apis.base import Api, ApiRequest
from atoll.gateway.apis.client_rules import apply_rules
from atoll.gateway.apis.fields import check_size
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
MAX_CONTROL_BYTES: Final = 64 << 10  # of a body that is no request for a turn

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
        self._buffered = 0  # bytes of bodies that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        api = self._apis.get(path) or self._counting.get(path)
        is_hot = api is not None and scope["method"] == "POST"
        if api is None:
            api = self._apis["/v1/messages" if path.startswith("/v1/messages") else "/v1/chat/completions"]
        try:
            if is_hot:
                await self._serve(api, scope, receive, send)
            else:
                await self._serve_control(scope, receive, send)
        except RequestError as error:
            error.with_traceback(None)  # whose frames hold the request, and the turn that holds the error
            await _respond(send, error.status, orjson.dumps(api.error(error)))
        except Exception:
            log.exception("%s %s", scope["method"], path)
            if is_hot:  # else FastAPI has answered
                failure = RequestError(500, "internal", "the gateway failed; its log has the traceback")
                await _respond(send, failure.status, orjson.dumps(api.error(failure)))

    async def _serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        session = await self._sessions.of_agent(bearer_key(scope))
        content = await self._read_body(scope, receive, self._max_body_bytes)
        if content is None:
            return  # the client left
        request = self._apply_rules(api.parse(parse_json(content)))
        check_size(request.chat)
        which = scope["path"].encode()[-16:]
        body = hashlib.blake2b(content, digest_size=16, person=which).digest()
        del content  # a turn may take minutes
        if scope["path"] in self._counting:
            num_tokens = await self._turns.count(session, request.chat)
            await _respond(send, 200, orjson.dumps({"input_tokens": num_tokens}))
            return
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

    async def _serve_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await self._read_body(scope, receive, MAX_CONTROL_BYTES)
        if content is None:
            return
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def replay() -> MutableMapping[str, Any]:
            return next(messages, {"type": "http.disconnect"})

        await self._control(scope, replay, send)

    async def _stream(
        self, api: Api, request: ApiRequest, session: Session, asked: AskedTurn, send: Send
    ) -> None:
        """Sends keep-alives while the turn is generated, then streams it."""
        if asked.record.done():
            await self._turns.result(asked)  # an error still has a status of its own
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while not asked.record.done():
            await _send_part(send, api.keep_alive)
            await asyncio.wait([asked.record], timeout=KEEP_ALIVE_S)
        try:
            record = await self._turns.result(asked)
        except RequestError as error:
            error.with_traceback(None)
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

    async def _read_body(self, scope: Scope, receive: Receive, limit: int) -> bytes | None:
        """None: the client left before its end. Raises RequestError for one that is too large or too slow,
        and while too many large ones are being read: what has arrived counts, not what is announced."""
        length = int(header(scope, b"content-length") or 0)
        if length > limit:
            raise RequestError(413, "too_large", f"a body of {length:,} bytes, expected at most {limit:,}")
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    content += message["body"]
                    self._buffered += len(message["body"])
                    if len(content) > limit:
                        raise RequestError(413, "too_large", f"a body of more than {limit:,} bytes")
                    if self._buffered > MAX_BUFFERED_BODIES * self._max_body_bytes:
                        raise RequestError(503, "unavailable", "too many large requests at once; try again")
                    if not message["more_body"]:
                        return bytes(content)
        except TimeoutError:
            raise RequestError(
                408, "invalid_request", f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._buffered -= len(content)


async def _respond(send: Send, status: int, content: bytes) -> None:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(content))]
    if status in UNREAD:
        headers.append((b"connection", b"close"))  # what is left of the body is not waited for
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_part(send: Send, content: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": more})
