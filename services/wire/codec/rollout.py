"""What is asked of the rollout service <-> messages. Pure."""

from atoll.wire.types import Sampling
from atoll.wire.v1 import types_pb2


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
