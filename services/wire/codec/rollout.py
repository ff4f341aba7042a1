"""Requests to the rollout service and its responses <-> messages. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from atoll.wire.codec.values import (
    decode_group_id,
    decode_tensor,
    decode_version,
    encode_group_id,
    encode_tensor,
    encode_version,
)
from atoll.wire.codec.weights import decode_shard_layout, encode_shard_layout
from atoll.wire.info import RolloutInfo
from atoll.wire.types import Float32, Int32, SampleId, Sampling, TurnId, TurnRequest, Version
from atoll.wire.v1 import rollout_pb2, types_pb2


def encode_turn_request(request: TurnRequest) -> rollout_pb2.TurnRequest:
    ids = request.ids
    message = rollout_pb2.TurnRequest(
        group=encode_group_id(request.group),
        context_ids=_encode_ids(request.context_ids),
        index=[id.sample.index for id in ids],
        attempt=[id.attempt for id in ids],
        sampling=encode_sampling(request.sampling),
        session=request.session,
        num_routed=request.num_routed,
    )
    if any(id.turn or id.branch for id in ids):  # first turns leave these out
        message.turn.extend(id.turn for id in ids)
        message.branch.extend(id.branch for id in ids)
    return message


def decode_turn_request(message: rollout_pb2.TurnRequest) -> TurnRequest:
    """Raises ValueError for columns of different lengths and for a request of nothing."""
    group, zeros = decode_group_id(message.group), [0] * len(message.index)
    ids = tuple(
        TurnId(SampleId(group, index), attempt, turn, branch)
        for index, attempt, turn, branch in zip(
            message.index, message.attempt, message.turn or zeros, message.branch or zeros, strict=True
        )
    )
    if not ids:
        raise ValueError(f"a request for turns of group {group} names none: expected an index or more")
    context_ids = _decode_ids(message.context_ids)
    sampling = decode_sampling(message.sampling)
    return TurnRequest(ids, context_ids, sampling, message.session, message.num_routed)


def encode_sampling(sampling: Sampling) -> types_pb2.Sampling:
    return types_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        seed=sampling.seed,
    )


def decode_sampling(message: types_pb2.Sampling) -> Sampling:
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        seed=message.seed,
    )


def encode_score_tokens(sequences: Sequence[Int32]) -> rollout_pb2.ScoreTokensRequest:
    return rollout_pb2.ScoreTokensRequest(sequences=[_encode_ids(ids) for ids in sequences])


def decode_score_tokens(message: rollout_pb2.ScoreTokensRequest) -> list[Int32]:
    return [_decode_ids(ids) for ids in message.sequences]


def encode_token_scores(logprobs: Sequence[Float32]) -> rollout_pb2.ScoreTokensReply:
    """Of each sequence [T], float32 [T-1]."""
    return rollout_pb2.ScoreTokensReply(logprobs=encode_tensor(np.concatenate(logprobs)))


def decode_token_scores(message: rollout_pb2.ScoreTokensReply, sequences: Sequence[Int32]) -> list[Float32]:
    """Raises ValueError for as many as `sequences` do not have."""
    logprobs = decode_tensor(message.logprobs).astype(np.float32, copy=False)
    ends = np.cumsum([len(ids) - 1 for ids in sequences])
    if logprobs.shape != (ends[-1],):
        raise ValueError(f"got log-probabilities of shape {logprobs.shape}, expected ({ends[-1]},)")
    return np.split(logprobs, ends[:-1])


def _encode_ids(ids: Int32) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def _decode_ids(data: bytes) -> Int32:
    return np.frombuffer(data, "<i4")


def encode_checksums(version: Version, checksums: Mapping[str, int]) -> rollout_pb2.ChecksumsReply:
    return rollout_pb2.ChecksumsReply(
        version=encode_version(version),
        tensors=list(checksums),
        checksums=encode_tensor(np.array(list(checksums.values()), np.uint64)),
    )


def decode_checksums(message: rollout_pb2.ChecksumsReply) -> tuple[Version, dict[str, int]]:
    checksums = decode_tensor(message.checksums).tolist()
    return decode_version(message.version), dict(zip(message.tensors, checksums, strict=True))


def encode_rollout_info(info: RolloutInfo) -> rollout_pb2.RolloutInfoReply:
    return rollout_pb2.RolloutInfoReply(
        name=info.name,
        incarnation=info.incarnation,
        version=encode_version(info.version),
        vocab_size=info.vocab_size,
        max_length=info.max_length,
        slots=info.slots,
        dtype=info.dtype,
        shard_layouts=[encode_shard_layout(shard_layout) for shard_layout in info.shard_layouts],
        running=info.running,
        queued=info.queued,
        tokens_generated=info.tokens_generated,
        tokens_prefilled=info.tokens_prefilled,
        route_shape=info.route_shape,
    )


def decode_rollout_info(message: rollout_pb2.RolloutInfoReply) -> RolloutInfo:
    return RolloutInfo(
        name=message.name,
        incarnation=message.incarnation,
        version=decode_version(message.version),
        vocab_size=message.vocab_size,
        max_length=message.max_length,
        slots=message.slots,
        dtype=message.dtype,
        shard_layouts=tuple(decode_shard_layout(boxes) for boxes in message.shard_layouts),
        running=message.running,
        queued=message.queued,
        tokens_generated=message.tokens_generated,
        tokens_prefilled=message.tokens_prefilled,
        route_shape=tuple(message.route_shape),
    )
