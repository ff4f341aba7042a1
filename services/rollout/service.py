"""The rollout servicer: the Rollout methods of package atoll.v1."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Self

import grpc.aio
import torch

from atoll.config.schema import RunConfig
from atoll.rollout.engines.base import Engine
from atoll.rollout.engines.local import LocalEngine
from atoll.rollout.generate import LINGER_S, Generator, linger_for
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.process import ServiceContext
from atoll.weights.transport.base import open_receiver
from atoll.wire.codec.rollout import (
    decode_score_tokens,
    decode_turn_request,
    encode_checksums,
    encode_rollout_info,
    encode_token_scores,
)
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.codec.values import decode_version
from atoll.wire.codec.weights import decode_push_part
from atoll.wire.info import RolloutInfo
from atoll.wire.types import EngineMemory, LoraSpec, PauseMode, ReceiverSetup, Version
from atoll.wire.v1 import rollout_pb2 as pb
from atoll.wire.v1 import rollout_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MODEL = "actor"  # the one model that a replica serves
AS_IN_FOLDER = Version("", 0)  # before the first push


class RolloutService(rollout_pb2_grpc.RolloutServicer):
    def __init__(self, engine: Engine, name: str, incarnation: str, linger_s: float = LINGER_S) -> None:
        self._engine = engine
        self._generator = Generator(engine, name, incarnation, linger_s)
        self._name = name
        self._incarnation = incarnation
        self._lineage = engine.version.lineage  # of the samples that are remembered

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        start = {"local": _start_local, "sglang": _start_sglang}[context.config.rollout.engine]
        rollout = context.config.rollout
        _log.info("computes on %s in %s", rollout.device, rollout.dtype)
        engine = await start(context.config)
        linger = linger_for(context.config.rollout.replicas)
        return cls(engine, context.name, context.incarnation, linger)

    def add_to(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServicer_to_server(self, server)

    async def wait_for_failure(self) -> None:
        await self._engine.wait_for_failure()

    async def close(self) -> None:
        await self._engine.close()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateReply]:
        if request.model != MODEL:
            raise UserError(f"Generate asks for model {request.model!r}; this replica serves {MODEL!r}")
        requests = [decode_turn_request(turn) for turn in request.turns]
        async with aclosing(self._generator.generate(requests)) as stream:
            async for samples in stream:
                yield pb.GenerateReply(turns=encode_payload(samples))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        return pb.AbortReply(aborted=await self._engine.abort(request.id_prefix))

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseReply:
        try:
            mode = PauseMode(request.mode)
        except ValueError:
            raise UserError(
                f"Pause has mode {request.mode}; expected one of {', '.join(map(repr, PauseMode))}"
            ) from None
        await self._engine.pause(mode)
        return pb.PauseReply(running=self._engine.info().running)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeReply:
        await self._engine.resume()
        return pb.ResumeReply()

    async def ReceiveWeights(
        self, request: pb.ReceiveWeightsRequest, context: Context
    ) -> pb.ReceiveWeightsReply:
        return pb.ReceiveWeightsReply(num_bytes=await self._engine.receive(decode_push_part(request)))

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: Context
    ) -> pb.CommitWeightsReply:
        version = decode_version(request.version)
        if request.finish_running:
            stall_s = await self._commit_quietly(version)
        else:
            stall_s = await self._engine.commit(version)
        if version.lineage != self._lineage:  # perhaps committed earlier, by a cancelled call
            self._generator.forget()
            self._lineage = version.lineage
        return pb.CommitWeightsReply(stall_s=stall_s)

    async def _commit_quietly(self, version: Version) -> float:
        """Commits after the running sequences have ended; returns the seconds from then on."""
        try:
            await self._engine.pause(PauseMode.WAIT)
            quiet = time.perf_counter()
            await self._engine.commit(version)
        finally:
            await self._engine.resume()
        return time.perf_counter() - quiet

    async def RollbackWeights(
        self, request: pb.RollbackWeightsRequest, context: Context
    ) -> pb.RollbackWeightsReply:
        await self._engine.rollback(decode_version(request.version))
        return pb.RollbackWeightsReply()

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        await self._engine.release()
        return pb.ReleaseReply()

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreReply:
        try:
            memory = EngineMemory(request.memory)
        except ValueError:
            raise UserError(
                f"Restore has memory {request.memory}; expected one of {', '.join(map(repr, EngineMemory))}"
            ) from None
        await self._engine.restore(memory)
        return pb.RestoreReply()

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensReply:
        return encode_token_scores(await self._engine.score_tokens(decode_score_tokens(request)))

    async def Checksums(self, request: pb.ChecksumsRequest, context: Context) -> pb.ChecksumsReply:
        return encode_checksums(*await self._engine.checksums())

    async def Progress(self, request: types_pb2.ProgressRequest, context: Context) -> types_pb2.ProgressReply:
        return types_pb2.ProgressReply(count=await self._engine.progress())

    async def Info(self, request: pb.RolloutInfoRequest, context: Context) -> pb.RolloutInfoReply:
        info = self._engine.info()
        return encode_rollout_info(
            RolloutInfo(
                name=self._name,
                incarnation=self._incarnation,
                version=self._engine.version,
                vocab_size=info.vocab_size,
                max_length=info.max_length,
                slots=info.slots,
                dtype=info.dtype,
                shard_layouts=self._engine.shard_layouts(),
                running=info.running,
                queued=info.queued,
                tokens_generated=info.tokens_generated,
                tokens_prefilled=info.tokens_prefilled,
                route_shape=info.route_shape,
            )
        )


async def _start_local(config: RunConfig) -> Engine:
    rollout, setup = config.rollout, _receiver_setup(config)
    torch.set_num_threads(rollout.threads)
    positions = read_spec(config.model.path).max_positions
    return await asyncio.to_thread(
        LocalEngine,
        config.model.path,
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[rollout.dtype],
        slots=rollout.local.slots,
        max_length=rollout.local.max_length or rollout.default_length(positions),
        version=AS_IN_FOLDER,
        receiver=open_receiver(setup.transport, setup.deadline_s),
        lora=setup.lora,
        records_routes=config.trainer.router_replay,
        takes_turns=setup.takes_turns,
    )


async def _start_sglang(config: RunConfig) -> Engine:
    from atoll.rollout.engines.sglang.engine import SGLangEngine  # its HTTP client comes with SGLang

    return await SGLangEngine.start(
        config.model.path,
        device=config.rollout.device,
        dtype=config.rollout.dtype,
        threads=config.rollout.threads,
        config=config.rollout.sglang,
        start_timeout_s=config.coordinator.start_timeout_s,
        version=AS_IN_FOLDER,
        setup=_receiver_setup(config),
        records_routes=config.trainer.router_replay,
        trainer_ranks=config.trainer.parallel.world_size,
    )


def _receiver_setup(config: RunConfig) -> ReceiverSetup:
    weights, lora = config.weights, config.trainer.lora
    pushed = LoraSpec(lora.rank, lora.alpha, lora.targets) if lora and lora.push == "adapter" else None
    return ReceiverSetup(
        weights.transport, weights.deadline_s, weights.staging, pushed, takes_turns=config.takes_turns
    )
