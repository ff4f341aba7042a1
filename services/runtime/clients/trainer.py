"""The trainer service's client."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.runtime.clients.base import CEILING_S, Caller, Client, Method, Reply, Request
from atoll.runtime.progress_timeout import await_with_progress
from atoll.wire.codec.batches import (
    chunk_tokens,
    encode_forward_backward,
    encode_step_key,
    put_segments,
    split_by_groups,
)
from atoll.wire.codec.trainer import decode_trainer_info
from atoll.wire.codec.values import decode_tensor
from atoll.wire.codec.weights import decode_published, encode_publish
from atoll.wire.info import TrainerInfo
from atoll.wire.types import Batch, CheckpointWrite, Float32, PublishedPart, PublishRequest, Segments, StepKey
from atoll.wire.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2


class TrainerClient(Client):
    """`role` is the model's part in the algorithm: actor, critic, reference, reward model.

    Calls may take long or wait for others: `timeout_s` bounds their silence.
    """

    def __init__(self, address: str, caller: Caller, timeout_s: float = 600.0, role: str = "actor") -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: trainer_pb2_grpc.TrainerAsyncStub = trainer_pb2_grpc.TrainerStub(self._channel)
        self._role = role

    async def _call(
        self, method: Method[Request, Awaitable[Reply]], request: Request, timeout_s: float | None = None
    ) -> Reply:
        """Without `timeout_s` for as long as there is progress."""
        if timeout_s is not None:
            return await super()._call(method, request, timeout_s)
        return await self._while_it_progresses(super()._call(method, request, CEILING_S))

    async def _while_it_progresses(self, call: Awaitable[Reply]) -> Reply:
        return await await_with_progress(call, self.progress, self._timeout_s)

    async def progress(self) -> int:
        """A number that changes while it makes progress."""
        request = types_pb2.ProgressRequest()
        return (await self._call(self._stub.Progress, request, self._timeout_s)).count

    async def info(self) -> TrainerInfo:
        request = trainer_pb2.TrainerInfoRequest(role=self._role)
        return await self._query(self._stub.Info, request, decode_trainer_info)

    async def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32:
        """float32 [T]: log-probability of each token given those before it; 0 for a root's first.

        `temperature` is that of the distribution; None: that of the run's samples.
        """
        requests = []
        for part, _ in split_by_groups(segments, chunk_tokens(segments, 4)):
            requests.append(trainer_pb2.ComputeLogprobsRequest(role=self._role, temperature=temperature))
            put_segments(requests[-1].segments, part)
        replies = self._stream(
            self._stub.ComputeLogprobs, iter(requests), lambda reply: decode_tensor(reply.logprobs)
        )
        return await self._while_it_progresses(_joined(replies))

    async def compute_values(self, segments: Segments) -> Float32:
        """float32 [T]: what the value head says after each token."""
        requests = []
        for part, _ in split_by_groups(segments, chunk_tokens(segments, 4)):
            requests.append(trainer_pb2.ComputeValuesRequest(role=self._role))
            put_segments(requests[-1].segments, part)
        replies = self._stream(
            self._stub.ComputeValues, iter(requests), lambda reply: decode_tensor(reply.values)
        )
        return await self._while_it_progresses(_joined(replies))

    async def forward_backward(self, key: StepKey, batch: Batch) -> Mapping[str, float]:
        """Accumulates gradients of sum(loss_weights * token loss); returns metrics."""
        chunks = list(encode_forward_backward(key, batch))
        return dict((await self._call(self._stub.ForwardBackward, iter(chunks))).metrics)

    async def optim_step(self, key: StepKey, learning_rate: float) -> Mapping[str, float]:
        request = trainer_pb2.OptimStepRequest(key=encode_step_key(key), learning_rate=learning_rate)
        return dict((await self._call(self._stub.OptimStep, request)).metrics)

    async def publish_weights(self, request: PublishRequest) -> PublishedPart:
        """Sends a part of the current weights, cast to its dtype, to the members of each plan.

        Returns once readers may read; collective transports continue in the background.
        """
        message = encode_publish(self._role, request)
        return await self._query(self._stub.PublishWeights, message, decode_published)

    async def save_checkpoint(self, path: Path) -> None:
        """Begins to write the current state to a folder, replacing one of that name."""
        request = trainer_pb2.SaveCheckpointRequest(role=self._role, path=str(path))
        await self._call(self._stub.SaveCheckpoint, request)

    async def wait_checkpoint(self, path: Path) -> CheckpointWrite:
        """Returns once the folder is written. Raises CheckpointError if it cannot be."""
        request = trainer_pb2.WaitCheckpointRequest(role=self._role, path=str(path))
        reply = await self._call(self._stub.WaitCheckpoint, request)
        return CheckpointWrite(reply.num_bytes, reply.seconds)

    async def load_checkpoint(self, path: Path | None) -> None:
        """None: resets the model to its state at service start."""
        request = trainer_pb2.LoadCheckpointRequest(role=self._role, path=str(path or ""))
        await self._call(self._stub.LoadCheckpoint, request)

    async def export_hf(self, path: Path) -> int:
        request = trainer_pb2.ExportHFRequest(role=self._role, path=str(path))
        return (await self._call(self._stub.ExportHF, request)).num_bytes

    async def load_hf(self, path: Path) -> None:
        """Loads the weights of a Hugging Face folder, such as one exported by another role."""
        request = trainer_pb2.LoadHFRequest(role=self._role, path=str(path))
        await self._call(self._stub.LoadHF, request)

    async def offload(self, *, keep_parameters: bool = False) -> int:
        """Moves the model to host memory until a call needs it; returns the bytes freed on all ranks."""
        request = trainer_pb2.OffloadRequest(role=self._role, keep_parameters=keep_parameters)
        return (await self._call(self._stub.Offload, request)).num_bytes


async def _joined(parts: AsyncIterator[NDArray[np.generic]]) -> Float32:
    return np.concatenate([part.astype(np.float32) async for part in parts])
