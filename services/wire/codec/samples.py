"""Samples and their rewards <-> messages. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat, starmap
from typing import Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from atoll.wire.codec.values import decode_group_id, decode_version, encode_group_id, encode_version
from atoll.wire.types import (
    Bool,
    FinishReason,
    Float32,
    GroupId,
    Int32,
    Node,
    Provenance,
    Sample,
    SampleId,
    TurnReward,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import types_pb2

T = TypeVar("T")

_REASON_TO_WIRE = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}
_REASON_FROM_WIRE = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


def encode_samples(samples: Iterable[Sample]) -> types_pb2.Samples:
    """Samples of any groups, in columns."""
    samples = list(samples)
    nodes = [node for sample in samples for node in sample.nodes]
    spans = [span for node in nodes for span in node.spans]
    groups, origins, versions = _Table[GroupId](), _Table[tuple[str, str]](), _Table[Version]()
    return types_pb2.Samples(
        group=[groups.number(sample.id.group) for sample in samples],
        groups=[encode_group_id(group) for group in groups],
        index=[sample.id.index for sample in samples],
        attempt=[sample.attempt for sample in samples],
        finish_reason=[_REASON_TO_WIRE[sample.finish_reason] for sample in samples],
        text=[sample.text for sample in samples],
        origin=[origins.number((s.provenance.replica, s.provenance.incarnation)) for s in samples],
        origins=[types_pb2.Origin(replica=replica, incarnation=start) for replica, start in origins],
        started=[sample.provenance.started for sample in samples],
        finished=[sample.provenance.finished for sample in samples],
        node_offsets=_offsets(len(sample.nodes) for sample in samples),
        node_parent=[node.parent for node in nodes],
        token_offsets=_offsets(len(node.token_ids) for node in nodes),
        token_ids=b"".join(node.token_ids.astype("<i4", copy=False).tobytes() for node in nodes),
        loss_mask=b"".join(node.loss_mask.tobytes() for node in nodes),
        logprobs=b"".join(node.logprobs.astype("<f4", copy=False).tobytes() for node in nodes),
        span_offsets=_offsets(len(node.spans) for node in nodes),
        span_version=[versions.number(span.version) for span in spans],
        versions=[encode_version(version) for version in versions],
        span_start=[span.start for span in spans],
        span_end=[span.end for span in spans],
        rewards=[encode_rewards(sample.rewards) for sample in samples]
        if any(sample.rewards for sample in samples)
        else [],
    )


def decode_samples(message: types_pb2.Samples) -> list[Sample]:
    """Raises ValueError for columns that do not fit together, log-probabilities that are not finite, token
    ids below 0, unknown finish reasons, and tokens of the policy that no span covers."""
    token_ids = np.frombuffer(message.token_ids, "<i4")
    loss_mask = np.frombuffer(message.loss_mask, np.bool_)
    logprobs = np.frombuffer(message.logprobs, "<f4")
    num_tokens = len(token_ids)
    if not num_tokens == len(loss_mask) == len(logprobs):
        raise ValueError(
            f"samples: {num_tokens} token ids, {len(loss_mask)} mask entries and {len(logprobs)} "
            "log-probabilities, expected as many of each"
        )
    _check_tokens(token_ids, loss_mask, logprobs)
    versions = [decode_version(version) for version in message.versions]
    span_version = _looked_up(versions, message.span_version)
    spans = list(
        starmap(VersionSpan, zip(span_version, message.span_start[:], message.span_end[:], strict=True))
    )
    parents = message.node_parent[:]
    nodes = [
        Node(
            parent, token_ids[start:end], loss_mask[start:end], logprobs[start:end], tuple(spans[first:last])
        )
        for parent, (start, end), (first, last) in zip(
            parents,
            _ranges(message.token_offsets, num_tokens),
            _ranges(message.span_offsets, len(spans)),
            strict=True,
        )
    ]
    for node in nodes:
        _check_spans(node)
    samples = [
        Sample(
            SampleId(group, index),
            attempt,
            tuple(nodes[first:last]),
            reason,
            text,
            Provenance(origin[0], origin[1], started, finished),
            decode_rewards(rewards) if rewards else (),
        )
        for group, index, attempt, (first, last), reason, text, origin, started, finished, rewards in zip(
            _looked_up([decode_group_id(group) for group in message.groups], message.group),
            message.index[:],
            message.attempt[:],
            _ranges(message.node_offsets, len(nodes)),
            _known_reasons(message.finish_reason[:]),
            message.text[:],
            _looked_up([(origin.replica, origin.incarnation) for origin in message.origins], message.origin),
            message.started[:],
            message.finished[:],
            message.rewards or repeat(None, len(message.group)),
            strict=True,
        )
    ]
    if parents.count(-1) < len(parents):  # of single turns all are
        for sample in samples:
            if not all(-1 <= node.parent < number for number, node in enumerate(sample.nodes)):
                raise ValueError(f"sample {sample.id}: a node whose parent is no earlier node of the sample")
    return samples


def _check_tokens(token_ids: Int32, loss_mask: Bool, logprobs: Float32) -> None:
    """In one pass over all samples of a message; an error need not say which sample it is."""
    if not len(token_ids):
        return
    if token_ids.min() < 0:
        raise ValueError(f"samples: token id {token_ids.min()}, expected 0 or more")
    if loss_mask.view(np.uint8).max() > 1:
        raise ValueError(f"samples: a mask entry of {loss_mask.view(np.uint8).max()}, expected 0 or 1")
    if not np.isfinite(logprobs).all():
        raise ValueError(
            f"samples: {np.count_nonzero(~np.isfinite(logprobs))} log-probabilities that are not finite"
        )


def _check_spans(node: Node) -> None:
    """Spans follow one another; between them nothing was produced by the policy."""
    at, length = 0, len(node.token_ids)
    if len(node.spans) == 1 and node.spans[0][1:] == (0, length):
        return  # as most do
    gaps = []
    for span in node.spans:
        if not at <= span.start <= span.end <= length:
            raise ValueError(
                f"samples: span [{span.start}, {span.end}) of a node of {length} tokens, expected one "
                f"between {at} and {length}"
            )
        gaps.append((at, span.start))
        at = span.end
    for start, end in [*gaps, (at, length)]:
        if start < end and node.loss_mask[start:end].any():
            raise ValueError(f"samples: no span covers tokens [{start}, {end}), which the policy produced")


def _ranges(offsets: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each row, which together cover [0, size)."""
    ends = offsets[:]  # a list: reading a message's column costs more
    if not ends or ends[0] != 0 or ends[-1] != size or ends != sorted(ends):
        raise ValueError(f"samples: offsets {_head(ends)}, expected them to ascend from 0 to {size}")
    return pairwise(ends)


def _looked_up(table: Sequence[T], numbers: Sequence[int]) -> Iterator[T]:
    numbers = numbers[:]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
        raise ValueError(f"samples: entries {_head(numbers)} of a table of {len(table)}")
    return map(table.__getitem__, numbers)


def _known_reasons(reasons: Sequence[types_pb2.FinishReason.ValueType]) -> Sequence[FinishReason]:
    if unknown := set(reasons) - _REASON_FROM_WIRE.keys():
        raise ValueError(f"samples: unknown finish reasons {sorted(unknown)}")
    return [_REASON_FROM_WIRE[reason] for reason in reasons]


def _head(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}{' ...' if len(numbers) > 8 else ''}"


def encode_rewards(rewards: Sequence[TurnReward]) -> types_pb2.Rewards:
    return types_pb2.Rewards(
        reward=[
            types_pb2.TurnReward(
                node=reward.node,
                value=reward.value,
                components=reward.components,
                reasons=reward.reasons,
            )
            for reward in rewards
        ]
    )


def decode_rewards(message: types_pb2.Rewards) -> tuple[TurnReward, ...]:
    return tuple(
        TurnReward(reward.node, reward.value, dict(reward.components), dict(reward.reasons))
        for reward in message.reward
    )


class _Table(Generic[T]):
    """Numbers distinct values in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def __iter__(self) -> Iterator[T]:
        return iter(self._numbers)


def _offsets(lengths: Iterable[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def decode_payload(content: bytes) -> list[Sample]:
    """Finished samples as they arrive and as the journal keeps them. Raises ValueError as `decode_samples`
    does, and for content that is no such message."""
    return decode_samples(parse_samples(content))


def parse_samples(content: bytes) -> types_pb2.Samples:
    """Raises ValueError for anything else."""
    try:
        return types_pb2.Samples.FromString(content)
    except DecodeError as error:
        raise ValueError(f"samples: {error}") from None


def encode_payload(samples: Iterable[Sample]) -> bytes:
    return encode_samples(samples).SerializeToString()
