"""What is asked of the rollout service <-> messages. Pure."""

import numpy as np

from atoll.wire.codec.values import decode_group_id, encode_group_id
from atoll.wire.types import SampleId, Sampling, TurnId, TurnRequest
from atoll.wire.v1 import rollout_pb2, types_pb2


def encode_turn_request(request: TurnRequest) -> rollout_pb2.TurnRequest:
    ids = request.ids
    message = rollout_pb2.TurnRequest(
        group=encode_group_id(request.group),
        context_ids=request.context_ids.astype("<i4", copy=False).tobytes(),
        index=[id.sample.index for id in ids],
        attempt=[id.attempt for id in ids],
        sampling=encode_sampling(request.sampling),
        session=request.session,
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
    context_ids = np.frombuffer(message.context_ids, "<i4")
    return TurnRequest(ids, context_ids, decode_sampling(message.sampling), message.session)


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
