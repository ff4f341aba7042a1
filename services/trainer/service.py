"""The trainer's door: package atoll.v1's Trainer, served by rank 0 and run by every rank.

The servicer (on rank 0, torch-free) turns each call into a command; `Rank` runs commands, on every rank,
all in one thread.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Self, cast

import grpc.aio
import torch.distributed as dist
from google.protobuf.message import Message

from services.config.schema import Role, RunConfig
from services.runtime.errors import AtollError, UserError
from services.runtime.process import ServiceContext
from services.runtime.tokenizer import tokenizer_digest
from services.trainer import checkpoint
from services.trainer.forward import Forward
from services.trainer.hf import export_hf, load_weights
from services.trainer.names import shapes
from services.trainer.publish import Publisher, merged
from services.trainer.ranks import CommandChannel, RankLostError, dismiss, lead
from services.trainer.roles import build_roles, section_of
from services.trainer.shards import catalog
from services.trainer.step import Learner
from services.wire import codec
from services.wire.v1 import trainer_pb2 as pb
from services.wire.v1 import trainer_pb2_grpc

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Rank:
    """Runs commands on one rank. Build and use it in one thread."""

    def __init__(self, config: RunConfig, role: Role) -> None:
        self._parallel = section_of(config, role).parallel
        models = build_roles(config, role)
        self.channel = CommandChannel()
        self._role = role
        self._forwards, self._learner = models.forwards, models.learner
        self._publisher: Publisher | None = None
        if role == "actor":
            policy = models.forwards["actor"].model
            self._publisher = Publisher(dist.get_rank(), catalog(policy.network, policy.spec)[1])
        self._commands: dict[str, Callable[[Sequence[bytes]], Message]] = {
            "Info": self._info,
            "ComputeLogprobs": self._compute_logprobs,
            "ComputeValues": self._compute_values,
            "ForwardBackward": self._forward_backward,
            "OptimStep": self._optim_step,
            "PublishWeights": self._publish_weights,
            "SaveCheckpoint": self._save_checkpoint,
            "LoadCheckpoint": self._load_checkpoint,
            "ExportHF": self._export_hf,
            "LoadHF": self._load_hf,
        }

    def execute(self, method: str, requests: Sequence[bytes]) -> bytes:
        """`requests` is one message, or the chunks of a stream; returns this rank's reply."""
        return self._commands[method](requests).SerializeToString()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        dist.destroy_process_group()

    def _forward(self, role: str) -> Forward:
        if role not in self._forwards:
            raise UserError(f"this trainer holds {' and '.join(self._forwards)}, not {role!r}")
        return self._forwards[role]  # type: ignore[index]

    def _trained(self, role: str) -> Learner:
        self._forward(role)
        if self._learner is None or role != self._role:
            raise UserError(f"the {role} is not trained: it has no updates and no checkpoint")
        return self._learner

    def _info(self, requests: Sequence[bytes]) -> Message:
        model = self._forward(pb.TrainerInfoRequest.FromString(requests[0]).role).model
        boxes, _ = catalog(model.network, model.spec)
        return pb.TrainerInfoReply(
            model=str(model.folder),
            world_size=self._parallel.world_size,
            tensor_parallel=self._parallel.tensor,
            data_parallel=self._parallel.data,
            num_parameters=sum(prod(shape) for shape in shapes(model.spec).values()),
            vocab_size=model.spec.vocab_size,
            tokenizer_digest=tokenizer_digest(model.folder),
            shards=[codec.encode_catalog(boxes)],
            roles=list(self._forwards),
        )

    def _compute_logprobs(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ComputeLogprobsRequest.FromString(data) for data in requests]
        segments = codec.join_segments([codec.decode_segments(chunk.segments) for chunk in chunks])
        logprobs_T = self._forward(chunks[0].role).compute_logprobs(segments)
        return pb.ComputeLogprobsReply(logprobs=codec.encode_tensor(logprobs_T))

    def _compute_values(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ComputeValuesRequest.FromString(data) for data in requests]
        segments = codec.join_segments([codec.decode_segments(chunk.segments) for chunk in chunks])
        values_T = self._forward(chunks[0].role).compute_values(segments)
        return pb.ComputeValuesReply(values=codec.encode_tensor(values_T))

    def _forward_backward(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ForwardBackwardRequest.FromString(data) for data in requests]
        key = codec.decode_step_key(chunks[0].key)
        metrics = self._trained(key.role).forward_backward(key, codec.decode_forward_backward(chunks))
        return pb.ForwardBackwardReply(metrics=metrics)

    def _optim_step(self, requests: Sequence[bytes]) -> Message:
        request = pb.OptimStepRequest.FromString(requests[0])
        key = codec.decode_step_key(request.key)
        return pb.OptimStepReply(metrics=self._trained(key.role).optim_step(key, request.learning_rate))

    def _publish_weights(self, requests: Sequence[bytes]) -> Message:
        request = pb.PublishWeightsRequest.FromString(requests[0])
        if self._publisher is None or request.role != self._role:
            raise UserError(
                f"the {request.role} is not published: replicas generate with the actor's weights"
            )
        published = self._publisher.publish(
            codec.decode_version(request.version),
            request.dtype,
            list(request.plan_ids),
            [codec.decode_plan(plan) for plan in request.plans],
            request.part,
        )
        return codec.encode_published(published)

    def _save_checkpoint(self, requests: Sequence[bytes]) -> Message:
        request = pb.SaveCheckpointRequest.FromString(requests[0])
        num_bytes = checkpoint.save(self._trained(request.role), Path(request.path))
        return pb.SaveCheckpointReply(num_bytes=num_bytes)

    def _load_checkpoint(self, requests: Sequence[bytes]) -> Message:
        request = pb.LoadCheckpointRequest.FromString(requests[0])
        checkpoint.load(self._trained(request.role), Path(request.path))
        return pb.LoadCheckpointReply()

    def _export_hf(self, requests: Sequence[bytes]) -> Message:
        request = pb.ExportHFRequest.FromString(requests[0])
        model = self._forward(request.role).model
        num_bytes = export_hf(model.network, model.spec, model.folder, Path(request.path))
        return pb.ExportHFReply(num_bytes=num_bytes)

    def _load_hf(self, requests: Sequence[bytes]) -> Message:
        request = pb.LoadHFRequest.FromString(requests[0])
        model = self._forward(request.role).model
        if self._learner is not None and request.role == self._role:
            self._learner.load_hf(Path(request.path))
        else:
            load_weights(model.network, model.spec, Path(request.path))
        return pb.LoadHFReply()


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
        role = cast(Role, context.role)
        return cls(thread, await loop.run_in_executor(thread, Rank, context.config, role))

    def add_to(self, server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)

    async def failed(self) -> None:
        await self._failed

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def Info(self, request: pb.TrainerInfoRequest, context: Context) -> pb.TrainerInfoReply:
        replies = [pb.TrainerInfoReply.FromString(reply) for reply in await self._run("Info", [request])]
        shards = [boxes for reply in replies for boxes in reply.shards]
        del replies[0].shards[:]
        replies[0].shards.extend(shards)
        return replies[0]

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Context
    ) -> AsyncIterator[pb.ComputeLogprobsReply]:
        """One reply per chunk."""
        chunks = await _collect(request_iterator)
        replies = await self._run("ComputeLogprobs", chunks)
        logprobs_T = codec.decode_tensor(pb.ComputeLogprobsReply.FromString(replies[0]).logprobs)
        for tokens in _tokens(chunks):
            yield pb.ComputeLogprobsReply(logprobs=codec.encode_tensor(logprobs_T[tokens]))

    async def ComputeValues(
        self, request_iterator: AsyncIterator[pb.ComputeValuesRequest], context: Context
    ) -> AsyncIterator[pb.ComputeValuesReply]:
        """One reply per chunk."""
        chunks = await _collect(request_iterator)
        replies = await self._run("ComputeValues", chunks)
        values_T = codec.decode_tensor(pb.ComputeValuesReply.FromString(replies[0]).values)
        for tokens in _tokens(chunks):
            yield pb.ComputeValuesReply(values=codec.encode_tensor(values_T[tokens]))

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[pb.ForwardBackwardRequest], context: Context
    ) -> pb.ForwardBackwardReply:
        chunks = await _collect(request_iterator)
        replies = await self._run("ForwardBackward", chunks)
        return pb.ForwardBackwardReply.FromString(replies[0])

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepReply:
        replies = await self._run("OptimStep", [request])
        return pb.OptimStepReply.FromString(replies[0])

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Context
    ) -> pb.PublishWeightsReply:
        replies = await self._run("PublishWeights", [request])
        parts = [codec.decode_published(pb.PublishWeightsReply.FromString(reply)) for reply in replies]
        return codec.encode_published(merged(parts))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Context
    ) -> pb.SaveCheckpointReply:
        replies = await self._run("SaveCheckpoint", [request])
        return pb.SaveCheckpointReply.FromString(replies[0])

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Context
    ) -> pb.LoadCheckpointReply:
        replies = await self._run("LoadCheckpoint", [request])
        return pb.LoadCheckpointReply.FromString(replies[0])

    async def ExportHF(self, request: pb.ExportHFRequest, context: Context) -> pb.ExportHFReply:
        replies = await self._run("ExportHF", [request])
        return pb.ExportHFReply.FromString(replies[0])

    async def LoadHF(self, request: pb.LoadHFRequest, context: Context) -> pb.LoadHFReply:
        replies = await self._run("LoadHF", [request])
        return pb.LoadHFReply.FromString(replies[0])

    async def _run(self, method: str, requests: Sequence[Message]) -> list[bytes]:
        """Every rank's reply. A rank that failed may hold half an update, so the whole fleet ends."""
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


def _tokens(chunks: Sequence[Any]) -> Iterator[slice]:
    """The tokens of each chunk's segments, among those of all chunks."""
    start = 0
    for chunk in chunks:
        end = start + chunk.segments.token_ids.shape[0]
        yield slice(start, end)
        start = end


async def _collect(chunks: AsyncIterator[Any]) -> list[Any]:
    collected = [chunk async for chunk in chunks]
    if not collected:
        raise UserError("the stream of chunks is empty: send at least one")
    return collected
