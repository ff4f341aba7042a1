"""The gateway's client, for the coordinator."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from atoll.runtime.clients.base import CEILING_S, Caller, Client
from atoll.wire.codec.gateway import (
    decode_session_reward,
    decode_session_summary,
    decode_turn_record,
    encode_session_id,
    encode_session_reward,
    encode_session_spec,
)
from atoll.wire.codec.rollout import decode_turn_request
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.info import GatewayInfo, SessionSummary
from atoll.wire.types import (
    SessionEnd,
    SessionId,
    SessionReward,
    SessionSpec,
    Trajectory,
    TurnRecord,
    TurnRequest,
    UndrawnTurn,
)
from atoll.wire.v1 import gateway_pb2, gateway_pb2_grpc


class GatewayClient(Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 60.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def open(self, session: SessionSpec) -> tuple[str, bool]:
        """The URL for its agent, and whether the session has these keys: one that was opened earlier keeps
        its own. A repeated call gets the same answer."""
        request = gateway_pb2.OpenSessionsRequest(sessions=[encode_session_spec(session)])
        return await self._query(self._stub.Open, request, lambda reply: (reply.url, reply.has_keys[0]))

    async def end(self, id: SessionId, reason: SessionEnd) -> tuple[SessionEnd, bytes]:
        """Why it ended first, and its trajectory as the journal keeps it; empty if it has no turn."""
        request = gateway_pb2.EndSessionRequest(id=encode_session_id(id), reason=reason.value)
        return await self._query(
            self._stub.End, request, lambda reply: (SessionEnd(reply.reason), reply.trajectory)
        )

    async def reward(self, id: SessionId, call: str, reward: SessionReward) -> None:
        """A repeated `call` adds nothing."""
        request = gateway_pb2.RewardSessionRequest(
            id=encode_session_id(id), call=call, reward=encode_session_reward(reward)
        )
        await self._call(self._stub.Reward, request)

    def draw(
        self, answers: AsyncIterator[tuple[Sequence[Trajectory], Sequence[UndrawnTurn]]]
    ) -> AsyncGenerator[list[TurnRequest], None]:
        """Wanted turns as they come, for as long as the gateway is there; sends it what `answers` yields."""

        async def messages() -> AsyncIterator[gateway_pb2.DrawnTurns]:
            async for drawn, undrawn in answers:
                yield gateway_pb2.DrawnTurns(
                    turns=encode_payload(drawn) if drawn else b"",
                    undrawn=[
                        gateway_pb2.UndrawnTurn(
                            id=str(turn.id), reason=turn.reason, end=turn.end.value if turn.end else ""
                        )
                        for turn in undrawn
                    ],
                )

        return self._stream(
            self._stub.Draw,
            messages(),
            lambda wanted: [decode_turn_request(turn) for turn in wanted.turns],
            CEILING_S,
        )

    async def info(self) -> GatewayInfo:
        reply = await self._call(self._stub.Info, gateway_pb2.GatewayInfoRequest())
        return GatewayInfo(reply.url, reply.num_sessions)

    async def show(self, id: SessionId) -> tuple[list[TurnRecord], list[SessionReward]]:
        """A session turn by turn. Raises UserError for one that is unknown."""
        request = gateway_pb2.ShowSessionRequest(id=encode_session_id(id))
        return await self._query(
            self._stub.Show,
            request,
            lambda reply: (
                [decode_turn_record(record) for record in reply.records],
                [decode_session_reward(reward) for reward in reply.rewards],
            ),
        )

    async def sessions(self) -> tuple[list[SessionSummary], dict[str, int]]:
        """The open sessions that the instance holds, and its counters since it started."""
        reply = await self._call(self._stub.List, gateway_pb2.ListSessionsRequest())
        return [decode_session_summary(session) for session in reply.sessions], dict(reply.counters)
