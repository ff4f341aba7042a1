"""The trainer's door: package atoll.v1's Trainer, served by rank 0 and run by every rank.

The servicer (on rank 0, torch-free) turns each call into a command; `Rank` runs commands, on every rank,
all in one thread.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Self

import grpc.aio
import torch
import torch.distributed as dist
from google.protobuf.message import Message

from services.config.schema import RunConfig
from services.runtime.errors import AtollError, UserError
from services.runtime.process import ServiceContext
from services.runtime.tokenizer import tokenizer_digest
from services.trainer import checkpoint, cpu_compat
from services.trainer.attention import SHARES_PREFIX
from services.trainer.hf import export_hf
from services.trainer.model import build, initialize_parallel
from services.trainer.names import shapes
from services.trainer.publish import Publisher, merged
from services.trainer.ranks import CommandChannel, RankLostError, dismiss, lead
from services.trainer.shards import catalog
from services.trainer.step import Learner
from services.wire import codec
from services.wire.v1 import trainer_pb2 as pb
from services.wire.v1 import trainer_pb2_grpc

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

ROLE = "actor"


class Rank:
    """Runs commands on one rank. Build and use it in one thread."""

    def __init__(self, config: RunConfig) -> None:
        trainer = config.trainer
        torch.set_num_threads(trainer.threads)
        initialize_parallel(trainer.parallel.tensor, trainer.parallel.data)
        with cpu_compat.apply():
            policy = build(config.model.path)
            self._learner = Learner(
                policy, trainer.optimizer, trainer.max_tokens_per_microbatch, SHARES_PREFIX[trainer.attention]
            )
        self.channel = CommandChannel()
        self._config = config
        self._policy = policy
        self._catalog, buffers = catalog(policy.model, policy.spec)
        self._publisher = Publisher(dist.get_rank(), buffers)
        self._commands: dict[str, Callable[[Sequence[bytes]], Message]] = {
            "Info": self._info,
            "ComputeLogprobs": self._compute_logprobs,
            "ForwardBackward": self._forward_backward,
            "OptimStep": self._optim_step,
            "PublishWeights": self._publish_weights,
            "SaveCheckpoint": self._save_checkpoint,
            "LoadCheckpoint": self._load_checkpoint,
            "ExportHF": self._export_hf,
        }

    def execute(self, method: str, requests: Sequence[bytes]) -> bytes:
        """`requests` is one message, or the chunks of a stream; returns this rank's reply."""
        return self._commands[method](requests).SerializeToString()

    def close(self) -> None:
        self._publisher.close()
        dist.destroy_process_group()

    def _info(self, requests: Sequence[bytes]) -> Message:
        parallel, spec = self._config.trainer.parallel, self._policy.spec
        return pb.TrainerInfoReply(
            model=str(self._policy.folder),
            world_size=parallel.world_size,
            tensor_parallel=parallel.tensor,
            data_parallel=parallel.data,
            num_parameters=sum(prod(shape) for shape in shapes(spec).values()),
            vocab_size=spec.vocab_size,
            tokenizer_digest=tokenizer_digest(self._policy.folder),
            shards=[codec.encode_catalog(self._catalog)],
        )

    def _compute_logprobs(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ComputeLogprobsRequest.FromString(data) for data in requests]
        segments = codec.join_segments([codec.decode_segments(chunk.segments) for chunk in chunks])
        logprobs_T = self._learner.compute_logprobs(segments, chunks[0].temperature)
        return pb.ComputeLogprobsReply(logprobs=codec.encode_tensor(logprobs_T))

    def _forward_backward(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ForwardBackwardRequest.FromString(data) for data in requests]
        metrics = self._learner.forward_backward(
            codec.decode_step_key(chunks[0].key),
            codec.decode_forward_backward(chunks),
            codec.decode_loss(chunks[0].loss),
        )
        return pb.ForwardBackwardReply(metrics=metrics)

    def _optim_step(self, requests: Sequence[bytes]) -> Message:
        request = pb.OptimStepRequest.FromString(requests[0])
        metrics = self._learner.optim_step(codec.decode_step_key(request.key), request.learning_rate)
        return pb.OptimStepReply(metrics=metrics)

    def _publish_weights(self, requests: Sequence[bytes]) -> Message:
        request = pb.PublishWeightsRequest.FromString(requests[0])
        published = self._publisher.publish(
            codec.decode_version(request.version),
            request.dtype,
            list(request.plan_ids),
            [codec.decode_plan(plan) for plan in request.plans],
            request.part,
        )
        return codec.encode_published(published)

    def _save_checkpoint(self, requests: Sequence[bytes]) -> Message:
        path = Path(pb.SaveCheckpointRequest.FromString(requests[0]).path)
        return pb.SaveCheckpointReply(num_bytes=checkpoint.save(self._learner, path))

    def _load_checkpoint(self, requests: Sequence[bytes]) -> Message:
        checkpoint.load(self._learner, Path(pb.LoadCheckpointRequest.FromString(requests[0]).path))
        return pb.LoadCheckpointReply()

    def _export_hf(self, requests: Sequence[bytes]) -> Message:
        path = Path(pb.ExportHFRequest.FromString(requests[0]).path)
        policy = self._policy
        return pb.ExportHFReply(num_bytes=export_hf(policy.model, policy.spec, policy.folder, path))


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Gives one command at a time to all ranks. Every mutating call is safe to repeat."""

    def __init__(self, thread: ThreadPoolExecutor, rank: Rank) -> None:
        self._thread = thread
        self._rank = rank
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        loop = asyncio.get_running_loop()
        return cls(thread, await loop.run_in_executor(thread, Rank, context.config))

    def add_to(self, server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)

    async def failed(self) -> None:
        await self._failed

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def Info(self, request: pb.TrainerInfoRequest, context: Context) -> pb.TrainerInfoReply:
        replies = [
            pb.TrainerInfoReply.FromString(reply)
            for reply in await self._run("Info", request.role, [request])
        ]
        shards = [boxes for reply in replies for boxes in reply.shards]
        del replies[0].shards[:]
        replies[0].shards.extend(shards)
        return replies[0]

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Context
    ) -> AsyncIterator[pb.ComputeLogprobsReply]:
        """One reply per chunk."""
        chunks = await _collect(request_iterator)
        replies = await self._run("ComputeLogprobs", chunks[0].role, chunks)
        logprobs_T = codec.decode_tensor(pb.ComputeLogprobsReply.FromString(replies[0]).logprobs)
        start = 0
        for chunk in chunks:
            end = start + chunk.segments.token_ids.shape[0]
            yield pb.ComputeLogprobsReply(logprobs=codec.encode_tensor(logprobs_T[start:end]))
            start = end

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[pb.ForwardBackwardRequest], context: Context
    ) -> pb.ForwardBackwardReply:
        chunks = await _collect(request_iterator)
        replies = await self._run("ForwardBackward", chunks[0].key.role, chunks)
        return pb.ForwardBackwardReply.FromString(replies[0])

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepReply:
        replies = await self._run("OptimStep", request.key.role, [request])
        return pb.OptimStepReply.FromString(replies[0])

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Context
    ) -> pb.PublishWeightsReply:
        replies = await self._run("PublishWeights", request.role, [request])
        parts = [codec.decode_published(pb.PublishWeightsReply.FromString(reply)) for reply in replies]
        return codec.encode_published(merged(parts))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Context
    ) -> pb.SaveCheckpointReply:
        replies = await self._run("SaveCheckpoint", request.role, [request])
        return pb.SaveCheckpointReply.FromString(replies[0])

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Context
    ) -> pb.LoadCheckpointReply:
        replies = await self._run("LoadCheckpoint", request.role, [request])
        return pb.LoadCheckpointReply.FromString(replies[0])

    async def ExportHF(self, request: pb.ExportHFRequest, context: Context) -> pb.ExportHFReply:
        replies = await self._run("ExportHF", request.role, [request])
        return pb.ExportHFReply.FromString(replies[0])

    async def _run(self, method: str, role: str, requests: Sequence[Message]) -> list[bytes]:
        """Every rank's reply. A rank that failed may hold half an update, so the whole fleet ends."""
        if role != ROLE:
            raise UserError(f"{method} asks for the role {role!r}, this trainer holds {ROLE!r}")
        serialized = [request.SerializeToString() for request in requests]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._thread, lead, self._rank.channel, self._rank.execute, method, serialized
            )
        except AtollError:
            raise
        except Exception as error:
            _log.critical("%s failed half-way: this trainer ends, restart it from a checkpoint", method)
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    def _close(self) -> None:
        with suppress(RankLostError):  # they may have been told to stop, too
            dismiss(self._rank.channel)
        self._rank.close()


async def _collect(chunks: AsyncIterator[Any]) -> list[Any]:
    collected = [chunk async for chunk in chunks]
    if not collected:
        raise UserError("the stream of chunks is empty: send at least one")
    return collected
