"""The gateway servicer: the Gateway methods of package atoll.v1."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from atoll.gateway.draws import Draws
from atoll.gateway.history.trajectory import build_trajectory
from atoll.gateway.session_store import SessionEndedError, SessionStore
from atoll.gateway.sessions import Sessions, reply_name
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.runtime.errors import UserError
from atoll.wire.codec.gateway import (
    decode_session_id,
    decode_session_reward,
    decode_session_spec,
    encode_session_reward,
    encode_session_summary,
    encode_turn_record,
)
from atoll.wire.codec.rollout import encode_turn_request
from atoll.wire.codec.trajectories import decode_payload, encode_payload
from atoll.wire.types import Message, SessionEnd, SessionId, Trajectory, TurnId
from atoll.wire.v1 import gateway_pb2 as pb
from atoll.wire.v1 import gateway_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    def __init__(
        self, sessions: Sessions, store: SessionStore, draws: Draws, chat_format: ChatFormat, url: str
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._draws = draws
        self._format = chat_format
        self._url = url

    def add_to(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, server)

    async def Open(self, request: pb.OpenSessionsRequest, context: Context) -> pb.OpenSessionsReply:
        specs = [decode_session_spec(session) for session in request.sessions]
        ours = await self._sessions.open(specs)
        return pb.OpenSessionsReply(url=self._url, has_keys=[spec.id in ours for spec in specs])

    async def End(self, request: pb.EndSessionRequest, context: Context) -> pb.EndSessionReply:
        id = decode_session_id(request.id)
        try:
            ended = await self._sessions.end(id, SessionEnd(request.reason))
        except SessionEndedError:
            raise _unknown(id) from None
        trajectory = build_trajectory(
            ended.records, id, ended.end, ended.rewards, read_reply=partial(self._read_reply, id)
        )
        return pb.EndSessionReply(
            trajectory=encode_payload([trajectory]) if trajectory else b"", reason=ended.end.value
        )

    def _read_reply(self, id: SessionId, drawn: Trajectory) -> Message:
        """The whole reply as a message, regardless of the client's own stop strings."""
        turn = drawn.turns[0]
        return self._format.parse(
            drawn.nodes[turn.node].token_ids,
            name=reply_name(id, turn),
            finish_reason=turn.finish_reason,
        ).message

    async def Reward(self, request: pb.RewardSessionRequest, context: Context) -> pb.RewardSessionReply:
        id = decode_session_id(request.id)
        try:
            await self._store.reward(id, request.call, decode_session_reward(request.reward))
        except SessionEndedError:
            raise _unknown(id) from None
        except KeyError as error:
            raise UserError(
                f"session {id} has no turn {error}: a reward names one that is finished"
            ) from None
        return pb.RewardSessionReply()

    async def Draw(
        self, request_iterator: AsyncIterator[pb.DrawnTurns], context: Context
    ) -> AsyncIterator[pb.WantedTurns]:
        hearing = asyncio.create_task(self._hear(request_iterator))
        hearing.add_done_callback(self._draws.interrupt)
        try:
            async for requests in self._draws.wanted(hearing):
                yield pb.WantedTurns(turns=map(encode_turn_request, requests))
            if hearing.done():
                hearing.result()
        finally:
            hearing.cancel()

    async def _hear(self, messages: AsyncIterator[pb.DrawnTurns]) -> None:
        """Consumes what the coordinator sends; ends with its stream."""
        async for message in messages:
            if message.turns:
                self._draws.deliver(decode_payload(message.turns))
            for undrawn in message.undrawn:
                end = SessionEnd(undrawn.end) if undrawn.end else None
                self._draws.give_up(TurnId.parse(undrawn.id), undrawn.reason, end)

    async def Info(self, request: pb.GatewayInfoRequest, context: Context) -> pb.GatewayInfoReply:
        return pb.GatewayInfoReply(url=self._url, num_sessions=len(self._sessions))

    async def List(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsReply:
        summaries = [encode_session_summary(summary) for summary in self._sessions.summaries()]
        return pb.ListSessionsReply(sessions=summaries, counters=self._sessions.counters)

    async def Show(self, request: pb.ShowSessionRequest, context: Context) -> pb.ShowSessionReply:
        id = decode_session_id(request.id)
        records, rewards = await self._store.show(id)
        if not records:
            raise _unknown(id)
        return pb.ShowSessionReply(
            records=map(encode_turn_record, records), rewards=map(encode_session_reward, rewards)
        )


def _unknown(id: SessionId) -> UserError:
    return UserError(f"session {id}: no such session, or it ended long ago")
