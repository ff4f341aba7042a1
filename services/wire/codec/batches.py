"""Batches and step keys <-> messages of the trainer. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from atoll.wire.codec.values import decode_routes, decode_tensor, put_tensor
from atoll.wire.types import Batch, Float32, PolicyBatch, Segments, StepKey, SupervisedBatch, ValueBatch
from atoll.wire.v1 import trainer_pb2, types_pb2

MAX_CHUNK_BYTES = 2 << 20  # of one streamed message; whole groups, so a single huge group may exceed it


def put_segments(message: types_pb2.Segments, segments: Segments) -> None:
    put_tensor(message.token_ids, segments.token_ids)
    put_tensor(message.offsets, segments.offsets)
    put_tensor(message.parents, segments.parents)
    put_tensor(message.groups, segments.groups)
    if segments.routes is not None:
        put_tensor(message.routes, segments.routes)


def decode_segments(message: types_pb2.Segments) -> Segments:
    return Segments(
        token_ids=decode_tensor(message.token_ids).astype(np.int32, copy=False),
        offsets=decode_tensor(message.offsets).astype(np.int64, copy=False),
        parents=decode_tensor(message.parents).astype(np.int32, copy=False),
        groups=decode_tensor(message.groups).astype(np.int32, copy=False),
        routes=decode_routes(message.routes) if message.HasField("routes") else None,
    )


def chunk_tokens(segments: Segments, bytes_per_token: int) -> int:
    """Tokens of a streamed message that has so many bytes for each, beside their routes."""
    if segments.routes is not None:
        bytes_per_token += segments.routes[:1].nbytes
    return MAX_CHUNK_BYTES // bytes_per_token


def split_by_groups(segments: Segments, max_tokens: int) -> Iterator[tuple[Segments, slice]]:
    """Whole groups of at most `max_tokens` tokens (more only where one group is larger), and their
    slice of the flat token arrays. Parents count from the first segment of each part."""
    starts = np.flatnonzero(np.diff(segments.groups, prepend=segments.groups[:1] - 1))
    bounds = [*starts.tolist(), len(segments.groups)]
    first = 0
    for i in range(1, len(bounds)):
        last_of_all = i == len(bounds) - 1
        if not last_of_all and segments.offsets[bounds[i + 1]] - segments.offsets[first] <= max_tokens:
            continue
        end = bounds[i]
        yield segments.part(first, end)
        first = end


def join_segments(parts: Sequence[Segments]) -> Segments:
    """The inverse of `split_by_groups`."""
    firsts = np.cumsum([0, *(len(part.parents) for part in parts)])
    tokens = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    routes = [part.routes for part in parts if part.routes is not None]
    return Segments(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        offsets=np.concatenate(
            [
                np.zeros(1, np.int64),
                *(part.offsets[1:] + at for part, at in zip(parts, tokens[:-1], strict=True)),
            ]
        ),
        parents=np.concatenate(
            [
                np.where(part.parents >= 0, part.parents + first, -1).astype(np.int32)
                for part, first in zip(parts, firsts[:-1], strict=True)
            ]
        ),
        groups=np.concatenate([part.groups for part in parts]),
        routes=np.concatenate(routes) if routes else None,
    )


def encode_forward_backward(key: StepKey, batch: Batch) -> Iterator[trainer_pb2.ForwardBackwardRequest]:
    """Chunks of whole groups; the key rides on each."""
    for segments, tokens in split_by_groups(batch.segments, chunk_tokens(batch.segments, 28)):
        request = trainer_pb2.ForwardBackwardRequest(key=encode_step_key(key))
        put_segments(request.segments, segments)
        put_tensor(request.loss_weights, batch.loss_weights[tokens])
        match batch:
            case PolicyBatch(old_logprobs=old, ref_logprobs=ref):
                put_tensor(request.policy.samples, batch.samples[tokens])
                put_tensor(request.policy.advantages, batch.advantages[tokens])
                put_tensor(request.policy.rollout_logprobs, batch.rollout_logprobs[tokens])
                if old is not None:
                    put_tensor(request.policy.old_logprobs, old[tokens])
                if ref is not None:
                    put_tensor(request.policy.ref_logprobs, ref[tokens])
            case ValueBatch():
                put_tensor(request.value.values, batch.values[tokens])
                put_tensor(request.value.returns, batch.returns[tokens])
        yield request


def decode_forward_backward(chunks: Sequence[trainer_pb2.ForwardBackwardRequest]) -> Batch:
    segments = join_segments([decode_segments(chunk.segments) for chunk in chunks])
    loss_weights = _join_tensors(chunk.loss_weights for chunk in chunks)
    match chunks[0].WhichOneof("tensors"):
        case "policy":
            first, parts = chunks[0].policy, [chunk.policy for chunk in chunks]
            has_old, has_ref = first.HasField("old_logprobs"), first.HasField("ref_logprobs")
            return PolicyBatch(
                segments,
                samples=np.concatenate([decode_tensor(part.samples).astype(np.int32) for part in parts]),
                loss_weights=loss_weights,
                advantages=_join_tensors(part.advantages for part in parts),
                rollout_logprobs=_join_tensors(part.rollout_logprobs for part in parts),
                old_logprobs=_join_tensors(part.old_logprobs for part in parts) if has_old else None,
                ref_logprobs=_join_tensors(part.ref_logprobs for part in parts) if has_ref else None,
            )
        case "value":
            values = _join_tensors(chunk.value.values for chunk in chunks)
            return ValueBatch(segments, loss_weights, values, _join_tensors(c.value.returns for c in chunks))
        case _:
            return SupervisedBatch(segments, loss_weights)


def _join_tensors(tensors: Iterable[types_pb2.Tensor]) -> Float32:
    return np.concatenate([decode_tensor(tensor).astype(np.float32, copy=False) for tensor in tensors])


def encode_step_key(key: StepKey) -> trainer_pb2.StepKey:
    return trainer_pb2.StepKey(lineage=key.lineage, step=key.step, minibatch=key.minibatch, role=key.role)


def decode_step_key(message: trainer_pb2.StepKey) -> StepKey:
    return StepKey(message.lineage, message.step, message.minibatch, message.role)
