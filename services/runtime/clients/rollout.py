"""The rollout service's client."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from atoll.runtime import errors
from atoll.runtime.clients.base import CEILING_S, Caller, Client
from atoll.wire.codec.rollout import (
    decode_checksums,
    decode_rollout_info,
    decode_token_scores,
    encode_score_tokens,
    encode_turn_request,
)
from atoll.wire.codec.trajectories import decode_trajectories, parse_trajectories
from atoll.wire.codec.values import decode_version, encode_version
from atoll.wire.codec.weights import encode_push_part
from atoll.wire.info import RolloutInfo
from atoll.wire.types import (
    BELOW_PROMPT,
    EngineMemory,
    Float32,
    Int32,
    PauseMode,
    PushPart,
    Trajectory,
    TurnRequest,
    Version,
)
from atoll.wire.v1 import rollout_pb2, rollout_pb2_grpc, types_pb2

ABORT_S = 5.0  # for an abort, which only saves work
RELEASE_S = 60.0  # for giving memory back or taking it again


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Samples that finished together, and their encoded bytes, which the journal stores."""

    samples: list[Trajectory]
    versions: tuple[Version, ...]  # that made their tokens
    num_tokens: int
    largest_id: int  # of all their tokens; -1 if there are none
    payload: bytes

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Raises ProtocolError for what `decode_trajectories` refuses."""
        try:
            message = parse_trajectories(payload)
            samples = decode_trajectories(message)
            _check_single_turns(message)
            token_ids = np.frombuffer(message.token_ids, "<i4")  # one look costs less than one per sample
            versions = tuple(map(decode_version, message.versions))
            return cls(samples, versions, len(token_ids), int(token_ids.max(initial=-1)), payload)
        except ValueError as error:
            raise errors.ProtocolError(str(error)) from error


def _check_single_turns(message: types_pb2.Trajectories) -> None:
    """Raises ValueError for what a replica has no say in: how turns hang together, and rewards."""
    others = message.turn_offsets, message.rewards, message.status, message.reason, message.conversation
    if (
        any(others)
        or any(message.turn_untrained)
        or message.node_parent != [BELOW_PROMPT] * len(message.group)
    ):
        raise ValueError(
            "samples: a tree, rewards or a status, expected a single turn of each and no rewards"
        )


class RolloutClient(Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: rollout_pb2_grpc.RolloutAsyncStub = rollout_pb2_grpc.RolloutStub(self._channel)

    def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        """Turns of any of the requests as they finish, each a trajectory of its own, those of one message
        together. Raises ProtocolError for an inconsistent message."""
        request = rollout_pb2.GenerateRequest(model=model, turns=map(encode_turn_request, requests))
        # unbounded: the caller watches for silence
        return self._stream(
            self._stub.Generate, request, lambda reply: Arrival.parse(reply.turns), timeout_s=CEILING_S
        )

    async def abort(self, id_prefix: str) -> int:
        request = rollout_pb2.AbortRequest(id_prefix=id_prefix)
        reply = await self._call(self._stub.Abort, request, min(ABORT_S, self._timeout_s))
        return reply.aborted

    async def pause(self, mode: PauseMode) -> None:
        request = rollout_pb2.PauseRequest(mode=rollout_pb2.PauseMode.ValueType(mode.value))
        await self._call(self._stub.Pause, request, CEILING_S)  # until running sequences end, in one mode

    async def resume(self) -> None:
        await self._call(self._stub.Resume, rollout_pb2.ResumeRequest())

    async def receive_weights(self, part: PushPart) -> int:
        """Stages it. Returns bytes copied."""
        reply = await self._call(self._stub.ReceiveWeights, encode_push_part(part))
        return reply.num_bytes

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        """Makes the staged version live; returns the seconds that generation stood still.

        `finish_running`: running sequences end first; otherwise they continue with the new weights.
        """
        request = rollout_pb2.CommitWeightsRequest(
            version=encode_version(version), finish_running=finish_running
        )
        # unbounded: the caller watches for silence
        reply = await self._call(self._stub.CommitWeights, request, CEILING_S)
        return reply.stall_s

    async def rollback_weights(self, version: Version) -> None:
        request = rollout_pb2.RollbackWeightsRequest(version=encode_version(version))
        await self._call(self._stub.RollbackWeights, request)

    async def release(self) -> None:
        """Ends what runs, and gives the memory of weights, keys and values back."""
        request = rollout_pb2.ReleaseRequest()
        await self._call(self._stub.Release, request, min(RELEASE_S, self._timeout_s))

    async def restore(self, memory: EngineMemory) -> None:
        request = rollout_pb2.RestoreRequest(memory=rollout_pb2.EngineMemory.ValueType(memory.value))
        await self._call(self._stub.Restore, request, min(RELEASE_S, self._timeout_s))

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        """Of each sequence [T], float32 [T-1]: log-probability of each token but the first, untempered."""
        # may wait for running sequences: the caller watches for silence
        return await self._query(
            self._stub.ScoreTokens,
            encode_score_tokens(sequences),
            lambda reply: decode_token_scores(reply, sequences),
            CEILING_S,
        )

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        """The live version, and xxh3-64 of each canonical tensor's bytes in the serving dtype."""
        return await self._query(self._stub.Checksums, rollout_pb2.ChecksumsRequest(), decode_checksums)

    async def progress(self) -> int:
        """A number that changes while it produces tokens."""
        return (await self._call(self._stub.Progress, types_pb2.ProgressRequest())).count

    async def info(self) -> RolloutInfo:
        return await self._query(self._stub.Info, rollout_pb2.RolloutInfoRequest(), decode_rollout_info)
