"""A stand-in for replicas: every turn takes the same time, and all say the same."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
from tokenizers import Tokenizer

from atoll.wire.codec.rollout import decode_turn_request
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.codec.values import decode_version
from atoll.wire.codec.weights import encode_shard_layout
from atoll.wire.types import (
    BELOW_PROMPT,
    FinishReason,
    Node,
    Origin,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import rollout_pb2, types_pb2
from benchmarks.coordinator_fleet import INCARNATION, WEIGHTS, Context, Method, done, reply, unary

MAX_LENGTH = 1 << 20


class Engine:
    """What all replicas share. `num_drawn` turns have left them."""

    def __init__(self, model: Path, turn_s: float, num_tokens: int) -> None:
        """`num_tokens`: of a reply."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "config.json").read_text())
        ids = tokenizer.encode("I look around and go on. " * num_tokens).ids[: num_tokens - 1]
        self.reply_ids = np.array([*ids, config["eos_token_id"]], np.int32)
        self.vocab_size = int(config["vocab_size"])
        self.turn_s = turn_s
        self.num_drawn = 0
        self._has_drawn = asyncio.Event()

    async def wait_for(self, num_drawn: int) -> None:
        while self.num_drawn < num_drawn:
            self._has_drawn.clear()
            await self._has_drawn.wait()

    def handlers(self, name: str, slots: int) -> dict[str, Method]:
        """Of one replica."""
        version = types_pb2.Version()

        async def generate(request: rollout_pb2.GenerateRequest, _: Context) -> AsyncIterator[bytes]:
            """Works as a replica with a slot for each turn."""
            asked = [decode_turn_request(turn) for turn in request.turns]
            if asked[0].session:  # else a probe, which is answered at once
                await asyncio.sleep(self.turn_s)
                self.num_drawn += sum(len(each.ids) for each in asked)
                self._has_drawn.set()
            drawn = [self._drawn(id, name, decode_version(version)) for each in asked for id in each.ids]
            yield reply(encode_payload(drawn))

        async def commit(request: rollout_pb2.CommitWeightsRequest, _: Context) -> bytes:
            version.CopyFrom(request.version)
            return rollout_pb2.CommitWeightsReply().SerializeToString()

        async def info(request: bytes, _: Context) -> bytes:
            return rollout_pb2.RolloutInfoReply(
                name=name,
                incarnation=INCARNATION,
                version=version,
                vocab_size=self.vocab_size,
                max_length=MAX_LENGTH,
                slots=slots,
                dtype="float32",
                shard_layouts=[encode_shard_layout(WEIGHTS)],
            ).SerializeToString()

        return {
            "Info": unary(info),
            "Generate": grpc.unary_stream_rpc_method_handler(
                generate, request_deserializer=rollout_pb2.GenerateRequest.FromString
            ),
            "CommitWeights": unary(commit, rollout_pb2.CommitWeightsRequest.FromString),
            **dict.fromkeys(("Abort", "ReceiveWeights", "RollbackWeights"), unary(done)),
        }

    def _drawn(self, id: TurnId, name: str, version: Version) -> Trajectory:
        T = len(self.reply_ids)
        node = Node(
            parent=BELOW_PROMPT,
            token_ids=self.reply_ids,
            loss_mask=np.ones(T, np.bool_),
            logprobs=np.full(T, -0.5, np.float32),
            spans=(VersionSpan(version, 0, T),),
        )
        now = time.time()
        turn = Turn(
            node=0,
            finish_reason=FinishReason.STOP,
            text="",
            origin=Origin(name, INCARNATION),
            started=now - self.turn_s,
            finished=now,
            number=id.turn,
            branch=id.branch,
        )
        return Trajectory(id.sample, id.attempt, (node,), (turn,), TrajectoryStatus.COMPLETED)
