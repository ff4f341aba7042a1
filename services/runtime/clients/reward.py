"""The reward service's client."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from atoll.runtime import errors
from atoll.runtime.clients.base import CEILING_S, MAX_MESSAGE_BYTES, Caller, Client
from atoll.wire.codec.rewards import (
    decode_execution,
    decode_reward_info,
    decode_verdict,
    encode_execute,
    encode_score,
)
from atoll.wire.info import RewardInfo
from atoll.wire.types import Execution, ProgramLimits, ScoreItem, Verdict
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc


class RewardClient(Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: reward_pb2_grpc.RewardAsyncStub = reward_pb2_grpc.RewardStub(self._channel)

    def verdicts(
        self, items: Sequence[ScoreItem], deadline_s: float = CEILING_S, *, by_group: bool = True
    ) -> AsyncGenerator[list[Verdict], None]:
        """Verdicts as they come, those of one message together; none on other items than these. `by_group`:
        what items share is sent once, which our own service understands. Raises ServiceUnavailableError if
        the service is silent for the client's timeout, and ProtocolError if it keeps sending beyond
        MAX_MESSAGE_BYTES."""
        samples = {str(item.id): item.id for item in items}
        size = 0

        def decode(reply: reward_pb2.ScoreReply) -> list[Verdict]:
            nonlocal size
            size += reply.ByteSize()
            if size > MAX_MESSAGE_BYTES:
                raise errors.ProtocolError(
                    f"Score at {self.address}: got more than {MAX_MESSAGE_BYTES:,} bytes of verdicts "
                    f"on {len(items)} items, expected less"
                )
            return [
                decode_verdict(verdict, sample)
                for verdict in reply.verdicts
                if (sample := samples.get(verdict.id))
            ]

        request = encode_score(items, by_group=by_group)
        return self._stream(self._stub.Score, request, decode, deadline_s, silence_s=self._timeout_s)

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """All verdicts, in the order of their completion, within the client's timeout; of a server of any
        origin."""
        async with aclosing(self.verdicts(items, self._timeout_s, by_group=False)) as stream:
            return [verdict async for some in stream for verdict in some]

    async def execute(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        """Runs a Python program in a sandbox. Raises UserError if the service has none, SandboxError if
        it cannot be set up."""
        return await self._query(self._stub.Execute, encode_execute(source, stdin, limits), decode_execution)

    async def describe(self) -> RewardInfo:
        return await self._query(self._stub.Describe, reward_pb2.DescribeRequest(), decode_reward_info)

    async def reload(self) -> None:
        """Raises UserError if a grader of the user's cannot be loaded; the old ones then stay."""
        await self._call(self._stub.Reload, reward_pb2.ReloadRequest())
