"""Executes each method of proto/atoll/wire/v1/trainer.proto on one rank.

Every rank runs every command, all in one thread; rank 0's thread is the one that the servicer (service.py)
gives commands to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist
from google.protobuf.message import DecodeError, Message

from atoll.config.schema import Role, RunConfig, section_name
from atoll.runtime.errors import UserError
from atoll.runtime.tokenizer import tokenizer_digest
from atoll.trainer import command_channel
from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.megatron.adapters.lora import PushedWeights, weights_to_push
from atoll.trainer.megatron.forward import Forward
from atoll.trainer.megatron.hf import export_hf, load_weights
from atoll.trainer.megatron.names import shapes
from atoll.trainer.megatron.shards import shard_layout
from atoll.trainer.offload import MemoryKind, ModelOffloader
from atoll.trainer.oom import explain_oom
from atoll.trainer.publish import Publisher
from atoll.trainer.roles import build_roles, join_ranks, longest_silence, section_of
from atoll.trainer.step import Learner
from atoll.weights.transport.base import open_sender
from atoll.wire.codec.batches import decode_forward_backward, decode_segments, decode_step_key, join_segments
from atoll.wire.codec.trainer import encode_trainer_info
from atoll.wire.codec.values import encode_tensor
from atoll.wire.codec.weights import decode_publish, encode_published
from atoll.wire.info import TrainerInfo
from atoll.wire.types import CheckpointWrite, Float32, Segments
from atoll.wire.v1 import trainer_pb2 as pb

Request = TypeVar("Request", bound=Message)
# A request, or those of a stream; returns the reply, or those of a stream.
Command = Callable[[Sequence[bytes]], Sequence[Message]]


class Rank:
    """Runs commands on one rank. Build and use it in one thread."""

    def __init__(self, config: RunConfig, role: Role, host: str) -> None:
        """`host`: the address of this machine that replicas can reach."""
        self._config, self._role, self._host = config, role, host
        self._parallel = section_of(config, role).parallel
        join_ranks(config, role)
        self._channel = command_channel.CommandChannel(longest_silence(config))
        self._checkpointer = Checkpointer()
        self._publisher: Publisher | None = None
        self._begin()
        self._commands: Mapping[str, Command] = {
            "Info": _unary(pb.TrainerInfoRequest, self._info),
            "ComputeLogprobs": _streaming(pb.ComputeLogprobsRequest, self._compute_logprobs),
            "ComputeValues": _streaming(pb.ComputeValuesRequest, self._compute_values),
            "ForwardBackward": _streaming(pb.ForwardBackwardRequest, self._forward_backward),
            "OptimStep": _unary(pb.OptimStepRequest, self._optim_step),
            "PublishWeights": _unary(pb.PublishWeightsRequest, self._publish_weights),
            "SaveCheckpoint": _unary(pb.SaveCheckpointRequest, self._save_checkpoint),
            "LoadCheckpoint": _unary(pb.LoadCheckpointRequest, self._load_checkpoint),
            "ExportHF": _unary(pb.ExportHFRequest, self._export_hf),
            "LoadHF": _unary(pb.LoadHFRequest, self._load_hf),
            "Offload": _unary(pb.OffloadRequest, self._offload),
        }

    def lead(self, method: str, requests: Sequence[bytes], *, ask_all: bool) -> list[list[bytes]]:
        """On rank 0: runs a command on every rank; see ranks.lead."""
        return command_channel.lead(self._channel, self.execute, method, requests, ask_all=ask_all)

    def dismiss(self) -> None:
        """On rank 0: ends the others."""
        with suppress(command_channel.RankLostError):  # they may have been told to stop, too
            command_channel.dismiss(self._channel)

    def follow(self) -> None:
        """On the others: runs rank 0's commands until it ends them."""
        command_channel.follow(self._channel, self.execute)

    def execute(self, method: str, requests: Sequence[bytes]) -> list[bytes]:
        """`requests` is one message, or the chunks of a stream; so is this rank's reply."""
        with self._explain_oom(method):
            return [reply.SerializeToString() for reply in self._commands[method](requests)]

    def _begin(self) -> None:
        """Builds the models as they are before their first update, in place of those that there were."""
        role = self._role
        self._release()
        with self._explain_oom("its start"):
            models = build_roles(self._config, role)
        self._forwards, self._learner = models.forwards, models.learner
        self._offloaders = {
            held: ModelOffloader(forward.model, self._learner if held == role else None)
            for held, forward in models.forwards.items()
        }
        if self._config.takes_turns:  # replicas may use the device before these models do
            for offloader in self._offloaders.values():
                offloader.offload()
        kl = self._config.algorithm.kl
        self._loss_asks_reference = kl is not None and kl.estimator == "full"
        self._pushed: PushedWeights | None = None
        if role == "actor":
            self._pushed = weights_to_push(models.forwards["actor"].model)
            weights = self._config.weights
            sender = partial(open_sender, weights.transport, weights.deadline_s, self._host)
            self._publisher = Publisher(
                dist.get_rank(),
                self._pushed.buffers,
                sender,
                self._pushed.refresh,
                stays_readable=weights.stays_readable,
                delta=weights.delta,
            )

    def _explain_oom(self, phase: str) -> AbstractContextManager[None]:
        return explain_oom(
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
        self._forwards, self._learner, self._offloaders, self._publisher = {}, None, {}, None

    def _check_role(self, role: str) -> Role:
        if role not in self._forwards:
            raise UserError(f"this trainer holds {' and '.join(self._forwards)}, not {role!r}")
        return cast(Role, role)

    def _forward_of(self, role: str) -> Forward:
        """With its weights on the device."""
        held = self._check_role(role)
        self._offloaders[held].onload(MemoryKind.PARAMETERS)
        return self._forwards[held]

    def _learner_of(self, role: str, *parts: MemoryKind) -> Learner:
        """With `parts` of its memory on the device."""
        if self._learner is None or self._check_role(role) != self._role:
            raise UserError(f"the {role} is not trained: it has no updates and no checkpoint")
        self._offloaders[self._role].onload(*parts)
        return self._learner

    def _info(self, request: pb.TrainerInfoRequest) -> pb.TrainerInfoReply:
        role = self._check_role(request.role)
        model = self._forwards[role].model
        boxes = self._pushed.shard_layout if self._pushed and role == self._role else shard_layout(model)[0]
        info = TrainerInfo(
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
            shard_layouts=(boxes,),
            roles=tuple(self._forwards),
        )
        return encode_trainer_info(info)

    def _compute_logprobs(self, chunks: Sequence[pb.ComputeLogprobsRequest]) -> Sequence[Message]:
        """One reply per chunk."""
        parts = [decode_segments(chunk.segments) for chunk in chunks]
        temperature = chunks[0].temperature if chunks[0].HasField("temperature") else None
        forward = self._forward_of(chunks[0].role)
        logprobs_T = forward.compute_logprobs(join_segments(parts), temperature)
        return [
            pb.ComputeLogprobsReply(logprobs=encode_tensor(part_T)) for part_T in _split(logprobs_T, parts)
        ]

    def _compute_values(self, chunks: Sequence[pb.ComputeValuesRequest]) -> Sequence[Message]:
        """One reply per chunk."""
        parts = [decode_segments(chunk.segments) for chunk in chunks]
        values_T = self._forward_of(chunks[0].role).compute_values(join_segments(parts))
        return [pb.ComputeValuesReply(values=encode_tensor(part_T)) for part_T in _split(values_T, parts)]

    def _forward_backward(self, chunks: Sequence[pb.ForwardBackwardRequest]) -> Sequence[Message]:
        key = decode_step_key(chunks[0].key)
        learner = self._learner_of(key.role, MemoryKind.PARAMETERS, MemoryKind.GRADIENTS)
        if self._loss_asks_reference:
            self._forward_of("reference")
        metrics = learner.forward_backward(key, decode_forward_backward(chunks))
        return [pb.ForwardBackwardReply(metrics=metrics)]

    def _optim_step(self, request: pb.OptimStepRequest) -> pb.OptimStepReply:
        key = decode_step_key(request.key)
        learner = self._learner_of(key.role, *MemoryKind)
        if self._publisher is not None:
            self._publisher.train_on()
        return pb.OptimStepReply(metrics=learner.optim_step(key, request.learning_rate))

    def _publish_weights(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsReply:
        if self._publisher is None or request.role != self._role:
            raise UserError(
                f"the {request.role} is not published: replicas generate with the actor's weights"
            )
        self._offloaders[self._role].onload(MemoryKind.PARAMETERS)
        return encode_published(self._publisher.publish(decode_publish(request)))

    def _save_checkpoint(self, request: pb.SaveCheckpointRequest) -> pb.SaveCheckpointReply:
        learner = self._learner_of(request.role)
        self._checkpointer.save(learner, Path(request.path), self._offloaders[self._role].locate)
        return pb.SaveCheckpointReply()

    def writing(self, role: str, path: str) -> "Future[CheckpointWrite]":
        """The last save; from any thread. Raises LostStateError if that is not of `path`."""
        self._check_role(role)
        return self._checkpointer.writing(Path(path))

    def _load_checkpoint(self, request: pb.LoadCheckpointRequest) -> pb.LoadCheckpointReply:
        learner = self._learner_of(request.role, *MemoryKind)
        if request.path:
            self._checkpointer.load(learner, Path(request.path))
        else:
            del learner
            self._begin()
        return pb.LoadCheckpointReply()

    def _export_hf(self, request: pb.ExportHFRequest) -> pb.ExportHFReply:
        model = self._forward_of(request.role).model
        num_bytes = export_hf(model, Path(request.path))
        return pb.ExportHFReply(num_bytes=num_bytes)

    def _load_hf(self, request: pb.LoadHFRequest) -> pb.LoadHFReply:
        model = self._forward_of(request.role).model
        if self._learner is not None and request.role == self._role:
            self._learner_of(request.role, *MemoryKind).load_hf(Path(request.path))
        else:
            load_weights(model, Path(request.path))
        return pb.LoadHFReply()

    def _offload(self, request: pb.OffloadRequest) -> pb.OffloadReply:
        role = self._check_role(request.role)
        offloader = self._offloaders[role]
        return pb.OffloadReply(num_bytes=offloader.offload(keep_parameters=request.keep_parameters))


def _unary(request: type[Request], run: Callable[[Request], Message]) -> Command:
    return lambda requests: [run(_parsed(request, requests[0]))]


def _streaming(request: type[Request], run: Callable[[Sequence[Request]], Sequence[Message]]) -> Command:
    return lambda requests: run([_parsed(request, data) for data in requests])


def _parsed(request: type[Request], data: bytes) -> Request:
    """Raises UserError on all ranks: the bytes come unchecked from the caller."""
    try:
        return request.FromString(data)
    except DecodeError as error:
        raise UserError(f"the request is not a {request.__name__}: {error}") from None


def _split(values_T: Float32, parts: Sequence[Segments]) -> Iterator[Float32]:
    """The values of each part's tokens."""
    start = 0
    for part in parts:
        end = start + len(part.token_ids)
        yield values_T[start:end]
        start = end
