"""The trainer's door: package atoll.v1's Trainer, served by rank 0 and run by every rank.

The servicer (on rank 0, torch-free) turns each call into a command; `Rank` runs commands, on every rank,
all in one thread.
"""
# long because each method is here twice: as it is served, and as every rank runs it

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self, cast

import grpc.aio
import torch.distributed as dist
from google.protobuf.message import Message

from atoll.config.schema import Role, RunConfig
from atoll.runtime.errors import AtollError, ServiceUnavailableError, UserError
from atoll.runtime.process import ServiceContext
from atoll.runtime.tokenizer import tokenizer_digest
from atoll.trainer import progress
from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.exhausted import explained
from atoll.trainer.folders import Folders
from atoll.trainer.megatron.forward import Forward
from atoll.trainer.megatron.hf import export_hf, load_weights
from atoll.trainer.megatron.lora import Pushed, pushed
from atoll.trainer.megatron.names import shapes
from atoll.trainer.megatron.shards import catalog
from atoll.trainer.publish import Publisher, merged
from atoll.trainer.ranks import CommandChannel, RankLostError, dismiss, lead
from atoll.trainer.residency import Part, Residency
from atoll.trainer.roles import build_roles, join_ranks, section_name, section_of
from atoll.trainer.step import Learner
from atoll.weights.transport.base import open_sender
from atoll.wire.codec.batches import decode_forward_backward, decode_segments, decode_step_key, join_segments
from atoll.wire.codec.values import decode_tensor, decode_version, encode_tensor
from atoll.wire.codec.weights import (
    decode_membership,
    decode_plan,
    decode_published,
    encode_catalog,
    encode_published,
)
from atoll.wire.types import Written
from atoll.wire.v1 import trainer_pb2 as pb
from atoll.wire.v1 import trainer_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_NAMES_A_FOLDER = pb.SaveCheckpointRequest | pb.LoadCheckpointRequest | pb.ExportHFRequest | pb.LoadHFRequest
Context = grpc.aio.ServicerContext[Any, Any]


class Rank:
    """Runs commands on one rank. Build and use it in one thread."""

    def __init__(self, config: RunConfig, role: Role, host: str) -> None:
        """`host`: the address of this machine that replicas can reach."""
        self._config, self._role, self._host = config, role, host
        self._parallel = section_of(config, role).parallel
        join_ranks(config, role)
        self.channel = CommandChannel()
        self._checkpointer = Checkpointer()
        self._publisher: Publisher | None = None
        self._begin()
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
            "Offload": self._offload,
        }

    def _begin(self) -> None:
        """Builds the models as they are before their first update, in place of those that there were."""
        role = self._role
        self._release()
        with self._explained("its start"):
            models = build_roles(self._config, role)
        self._forwards, self._learner = models.forwards, models.learner
        self._memory = {
            held: Residency(forward.model, self._learner if held == role else None)
            for held, forward in models.forwards.items()
        }
        kl = self._config.algorithm.kl
        self._loss_asks_reference = kl is not None and kl.estimator == "full"
        self._pushed: Pushed | None = None
        if role == "actor":
            self._pushed = pushed(models.forwards["actor"].model)
            weights = self._config.weights
            sender = partial(open_sender, weights.transport, weights.deadline_s, self._host)
            self._publisher = Publisher(
                dist.get_rank(), self._pushed.buffers, sender, self._pushed.refresh, delta=weights.delta
            )

    def execute(self, method: str, requests: Sequence[bytes]) -> bytes:
        """`requests` is one message, or the chunks of a stream; returns this rank's reply."""
        with self._explained(method):
            return self._commands[method](requests).SerializeToString()

    def _explained(self, phase: str) -> AbstractContextManager[None]:
        return explained(
            f"{self._role} rank {dist.get_rank()}",
            phase,
            section_name(self._role),
            section_of(self._config, self._role),
            lambda: max((forward.num_tokens for forward in self._forwards.values()), default=0),
        )

    def close(self) -> None:
        self._release()
        self._checkpointer.close()
        dist.destroy_process_group()

    def _release(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._forwards, self._learner, self._memory, self._publisher = {}, None, {}, None

    def _held(self, role: str) -> Role:
        if role not in self._forwards:
            raise UserError(f"this trainer holds {' and '.join(self._forwards)}, not {role!r}")
        return cast(Role, role)

    def _forward(self, role: str) -> Forward:
        """With its weights on the device."""
        held = self._held(role)
        self._memory[held].bring(Part.PARAMETERS)
        return self._forwards[held]

    def _trained(self, role: str, *parts: Part) -> Learner:
        """With its weights and `parts` of its memory on the device."""
        if self._learner is None or self._held(role) != self._role:
            raise UserError(f"the {role} is not trained: it has no updates and no checkpoint")
        self._memory[self._role].bring(Part.PARAMETERS, *parts)
        return self._learner

    def _info(self, requests: Sequence[bytes]) -> Message:
        role = self._held(pb.TrainerInfoRequest.FromString(requests[0]).role)
        model = self._forwards[role].model
        boxes = self._pushed.catalog if self._pushed and role == self._role else catalog(model)[0]
        return pb.TrainerInfoReply(
            model=str(model.folder),
            world_size=self._parallel.world_size,
            tensor_parallel=self._parallel.tensor,
            pipeline_parallel=self._parallel.pipeline,
            context_parallel=self._parallel.context,
            expert_parallel=self._parallel.expert,
            data_parallel=self._parallel.data,
            num_parameters=sum(prod(shape) for shape in shapes(model.spec).values()),
            vocab_size=model.spec.vocab_size,
            tokenizer_digest=tokenizer_digest(model.folder),
            shards=[encode_catalog(boxes)],
            roles=list(self._forwards),
        )

    def _compute_logprobs(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ComputeLogprobsRequest.FromString(data) for data in requests]
        segments = join_segments([decode_segments(chunk.segments) for chunk in chunks])
        temperature = chunks[0].temperature if chunks[0].HasField("temperature") else None
        logprobs_T = self._forward(chunks[0].role).compute_logprobs(segments, temperature)
        return pb.ComputeLogprobsReply(logprobs=encode_tensor(logprobs_T))

    def _compute_values(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ComputeValuesRequest.FromString(data) for data in requests]
        segments = join_segments([decode_segments(chunk.segments) for chunk in chunks])
        values_T = self._forward(chunks[0].role).compute_values(segments)
        return pb.ComputeValuesReply(values=encode_tensor(values_T))

    def _forward_backward(self, requests: Sequence[bytes]) -> Message:
        chunks = [pb.ForwardBackwardRequest.FromString(data) for data in requests]
        key = decode_step_key(chunks[0].key)
        learner = self._trained(key.role, Part.GRADIENTS)
        if self._loss_asks_reference:
            self._forward("reference")
        metrics = learner.forward_backward(key, decode_forward_backward(chunks))
        return pb.ForwardBackwardReply(metrics=metrics)

    def _optim_step(self, requests: Sequence[bytes]) -> Message:
        request = pb.OptimStepRequest.FromString(requests[0])
        key = decode_step_key(request.key)
        learner = self._trained(key.role, Part.GRADIENTS, Part.OPTIMIZER)
        if self._publisher is not None:
            self._publisher.train_on()
        return pb.OptimStepReply(metrics=learner.optim_step(key, request.learning_rate))

    def _publish_weights(self, requests: Sequence[bytes]) -> Message:
        request = pb.PublishWeightsRequest.FromString(requests[0])
        if self._publisher is None or request.role != self._role:
            raise UserError(
                f"the {request.role} is not published: replicas generate with the actor's weights"
            )
        self._memory[self._role].bring(Part.PARAMETERS)
        published = self._publisher.publish(
            decode_version(request.version),
            request.dtype,
            {
                plan_id: decode_membership(membership)
                for plan_id, membership in zip(request.plan_ids, request.members, strict=True)
            },
            [decode_plan(plan) for plan in request.plans],
            request.part,
        )
        return encode_published(published)

    def _save_checkpoint(self, requests: Sequence[bytes]) -> Message:
        request = pb.SaveCheckpointRequest.FromString(requests[0])
        self._checkpointer.save(self._trained(request.role, Part.OPTIMIZER), Path(request.path))
        return pb.SaveCheckpointReply()

    def writing(self, role: str, path: str) -> "Future[Written]":
        """The last save; from any thread. Raises LostStateError where that is not of `path`."""
        self._held(role)
        return self._checkpointer.writing(Path(path))

    def _load_checkpoint(self, requests: Sequence[bytes]) -> Message:
        request = pb.LoadCheckpointRequest.FromString(requests[0])
        learner = self._trained(request.role, *Part)
        if request.path:
            self._checkpointer.load(learner, Path(request.path))
        else:
            del learner
            self._begin()
        return pb.LoadCheckpointReply()

    def _export_hf(self, requests: Sequence[bytes]) -> Message:
        request = pb.ExportHFRequest.FromString(requests[0])
        model = self._forward(request.role).model
        num_bytes = export_hf(model, Path(request.path))
        return pb.ExportHFReply(num_bytes=num_bytes)

    def _load_hf(self, requests: Sequence[bytes]) -> Message:
        request = pb.LoadHFRequest.FromString(requests[0])
        model = self._forward(request.role).model
        if self._learner is not None and request.role == self._role:
            self._trained(request.role, *Part).load_hf(Path(request.path))
        else:
            load_weights(model, Path(request.path))
        return pb.LoadHFReply()

    def _offload(self, requests: Sequence[bytes]) -> Message:
        role = self._held(pb.OffloadRequest.FromString(requests[0]).role)
        return pb.OffloadReply(num_bytes=self._memory[role].offload())


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Gives one command at a time to all ranks. Every mutating call is safe to repeat."""

    def __init__(self, thread: ThreadPoolExecutor, rank: Rank, folders: Folders) -> None:
        self._thread = thread
        self._folders = folders
        self._rank = rank
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._is_broken = False  # known to the compute thread at once

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        loop = asyncio.get_running_loop()
        role = cast(Role, context.role)
        rank = await loop.run_in_executor(thread, Rank, context.config, role, context.host)
        return cls(thread, rank, Folders(context.config.folder, context.exports))

    def add_to(self, server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)

    async def failed(self) -> None:
        await self._failed

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def Info(self, request: pb.TrainerInfoRequest, context: Context) -> pb.TrainerInfoReply:
        replies = [pb.TrainerInfoReply.FromString(reply) for reply in await self._run("Info", [request])]
        info, numbers = replies[0], dict[bytes, int]()
        for reply in replies:
            [boxes] = reply.shards[:1]
            number = numbers.setdefault(boxes.SerializeToString(deterministic=True), len(numbers))
            if number == len(info.shards):
                info.shards.append(boxes)
            info.shard_of_rank.append(number)
        return info

    async def Progress(self, request: types_pb2.ProgressRequest, context: Context) -> types_pb2.ProgressReply:
        """Beside the commands, of which one may take hours. Ranks wait for each other: one speaks for all."""
        return types_pb2.ProgressReply(count=progress.done())

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Context
    ) -> AsyncIterator[pb.ComputeLogprobsReply]:
        """One reply per chunk."""
        chunks = await _collect(request_iterator)
        replies = await self._run("ComputeLogprobs", chunks)
        logprobs_T = decode_tensor(pb.ComputeLogprobsReply.FromString(replies[0]).logprobs)
        for tokens in _tokens(chunks):
            yield pb.ComputeLogprobsReply(logprobs=encode_tensor(logprobs_T[tokens]))

    async def ComputeValues(
        self, request_iterator: AsyncIterator[pb.ComputeValuesRequest], context: Context
    ) -> AsyncIterator[pb.ComputeValuesReply]:
        """One reply per chunk."""
        chunks = await _collect(request_iterator)
        replies = await self._run("ComputeValues", chunks)
        values_T = decode_tensor(pb.ComputeValuesReply.FromString(replies[0]).values)
        for tokens in _tokens(chunks):
            yield pb.ComputeValuesReply(values=encode_tensor(values_T[tokens]))

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
        parts = [decode_published(pb.PublishWeightsReply.FromString(reply)) for reply in replies]
        return encode_published(merged(parts))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Context
    ) -> pb.SaveCheckpointReply:
        replies = await self._run("SaveCheckpoint", [request])
        return pb.SaveCheckpointReply.FromString(replies[0])

    async def WaitCheckpoint(
        self, request: pb.WaitCheckpointRequest, context: Context
    ) -> pb.WaitCheckpointReply:
        """Beside the commands: this rank knows when all have written."""
        writing = asyncio.wrap_future(self._rank.writing(request.role, request.path))
        written = await asyncio.shield(writing)  # a caller that gives up ends its own waiting alone
        return pb.WaitCheckpointReply(num_bytes=written.num_bytes, seconds=written.seconds)

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

    async def Offload(self, request: pb.OffloadRequest, context: Context) -> pb.OffloadReply:
        replies = await self._run("Offload", [request])
        return pb.OffloadReply(num_bytes=sum(pb.OffloadReply.FromString(r).num_bytes for r in replies))

    async def _run(self, method: str, requests: Sequence[Message]) -> list[bytes]:
        """Every rank's reply."""
        for request in requests:
            if isinstance(request, _NAMES_A_FOLDER) and request.path:
                self._folders.check(request.path)
        serialized = [request.SerializeToString() for request in requests]
        return await self._loop.run_in_executor(self._thread, self._lead, method, serialized)

    def _lead(self, method: str, requests: Sequence[bytes]) -> list[bytes]:
        """A rank that failed may hold half an update, so the whole fleet ends, also where the caller has left
        by then."""
        if self._is_broken:
            raise ServiceUnavailableError("this trainer is ending: an earlier call failed half-way")
        try:
            return lead(self._rank.channel, self._rank.execute, method, requests)
        except AtollError:
            raise
        except Exception as error:
            _log.critical("%s failed half-way: this trainer ends, restart it from a checkpoint", method)
            self._is_broken = True
            self._loop.call_soon_threadsafe(self._fail, error)
            raise ServiceUnavailableError(f"{method} failed half-way, this trainer ends: {error}") from error

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _close(self) -> None:
        if not self._is_broken:  # else the others wait in what has failed, until the connections close
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
