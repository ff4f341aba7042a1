"""Assembles a gateway instance: gRPC for the coordinator, HTTP for agents."""

import asyncio
import gc
import socket
import time
from typing import Self

import grpc.aio

from atoll.config.load import OPERATOR_TOKEN, access_token, optional_token
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.messages import CountTokensApi, MessagesApi
from atoll.gateway.apis.responses import ResponsesApi
from atoll.gateway.app import GatewayApp
from atoll.gateway.control import control_app
from atoll.gateway.draws import Draws
from atoll.gateway.http_server import HttpServer
from atoll.gateway.service import GatewayService
from atoll.gateway.session_store import SessionStore
from atoll.gateway.sessions import Sessions
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.gateway.templates.proof import prove
from atoll.gateway.turns import Turns
from atoll.runtime.model_spec import read_spec
from atoll.runtime.process import BACKLOG, ServiceContext
from atoll.runtime.server import advertised_host
from atoll.runtime.store import Store


class GatewayInstance:
    def __init__(
        self, servicer: GatewayService, draws: Draws, http: HttpServer, kept: SessionStore, store: Store
    ) -> None:
        self._servicer = servicer
        self._draws = draws
        self._http = http
        self._kept = kept
        self._store = store

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        config, section = context.config, context.config.gateway
        limit = config.sequence_limit
        max_length = (
            limit.tokens
            if limit
            else config.rollout.default_length(read_spec(config.model.path).max_positions)
        )
        chat_format = ChatFormat.of_section(config.model.path, section, max_length)
        await prove(chat_format)
        store = Store(context.store, config.run.name)
        await store.wait_until_ready(config.coordinator.start_timeout_s)
        await store.follow_epoch()
        kept = SessionStore(store)
        sessions, draws = Sessions(kept), Draws()
        turns = Turns(sessions, kept, draws, chat_format, max_length)
        apis = {
            "/v1/chat/completions": ChatApi(),
            "/v1/responses": ResponsesApi(),
            "/v1/messages": MessagesApi(),
        }
        counting = {"/v1/messages/count_tokens": CountTokensApi()}
        tokens = frozenset(filter(None, [access_token(), optional_token(OPERATOR_TOKEN)]))
        control = control_app(
            sessions, apis, model=config.run.name, created=int(time.time()), operator_tokens=tokens
        )
        app = GatewayApp(
            apis,
            counting,
            control,
            sessions,
            turns,
            rules=frozenset(section.rules),
            max_body_bytes=section.max_body_mb << 20,
        )
        listener = _listener(context)
        host, port = listener.getsockname()[:2]
        url = f"http://{advertised_host(host)}:{port}"
        http = await HttpServer.start(app, listener)
        gc.freeze()  # modules, tokenizer and template live as long as the process: never walk them again
        return cls(GatewayService(sessions, kept, draws, chat_format, url), draws, http, kept, store)

    def add_to(self, server: grpc.aio.Server) -> None:
        self._servicer.add_to(server)

    async def wait_for_failure(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._draws.close()
        await self._http.stop()
        await self._kept.close()
        await self._store.close()


def _listener(context: ServiceContext) -> socket.socket:
    """The one that the launcher keeps for this instance, or one of its own."""
    if context.http_fd is not None:
        return socket.socket(fileno=context.http_fd)
    section = context.config.gateway
    return socket.create_server((section.host, section.port), backlog=BACKLOG)
