"""Trajectories and their rewards <-> messages. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat, starmap
from typing import Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from atoll.wire.codec.rewards import decode_message, encode_message
from atoll.wire.codec.values import (
    decode_group_id,
    decode_routes,
    decode_version,
    encode_group_id,
    encode_version,
    put_tensor,
)
from atoll.wire.types import (
    BELOW_PROMPT,
    NEW_CONVERSATION,
    STATUS_AFTER,
    WHOLE,
    Bool,
    FinishReason,
    Float32,
    GroupId,
    Int32,
    Node,
    Origin,
    Routes,
    SampleId,
    Trajectory,
    TrajectoryStatus,
    Turn,
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
_STATUS_TO_WIRE = {
    TrajectoryStatus.COMPLETED: types_pb2.TRAJECTORY_STATUS_COMPLETED,
    TrajectoryStatus.TRUNCATED: types_pb2.TRAJECTORY_STATUS_TRUNCATED,
    TrajectoryStatus.ABORTED: types_pb2.TRAJECTORY_STATUS_ABORTED,
}
# By their numbers on the wire. One that is not specified is not trained on.
_STATUSES = (TrajectoryStatus.ABORTED, *_STATUS_TO_WIRE)


def encode_trajectories(trajectories: Iterable[Trajectory]) -> types_pb2.Trajectories:
    """Trajectories of any groups, in columns."""
    trajectories = list(trajectories)
    nodes = [node for trajectory in trajectories for node in trajectory.nodes]
    spans = [span for node in nodes for span in node.spans]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    groups, origins, versions = _Table[GroupId](), _Table[Origin](), _Table[Version]()
    message = types_pb2.Trajectories(
        group=[groups.number(trajectory.id.group) for trajectory in trajectories],
        groups=[encode_group_id(group) for group in groups],
        index=[trajectory.id.index for trajectory in trajectories],
        attempt=[trajectory.attempt for trajectory in trajectories],
        finish_reason=[_REASON_TO_WIRE[turn.finish_reason] for turn in turns],
        text=[turn.text for turn in turns],
        origin=[origins.number(turn.origin) for turn in turns],
        origins=[types_pb2.Origin(replica=replica, incarnation=start) for replica, start in origins],
        started=[turn.started for turn in turns],
        finished=[turn.finished for turn in turns],
        node_offsets=_offsets(len(trajectory.nodes) for trajectory in trajectories),
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
    )
    if routes := [node.routes for node in nodes if node.routes is not None]:
        counts = (0 if node.routes is None else len(node.routes) for node in nodes)
        message.route_offsets.extend(_offsets(counts))
        put_tensor(message.routes, np.concatenate(routes))
    # columns that say nothing of most single turns are left out then
    if any(trajectory.rewards for trajectory in trajectories):
        message.rewards.extend(encode_rewards(trajectory.rewards) for trajectory in trajectories)
    if any(len(trajectory.turns) != 1 or trajectory.turns[0].node for trajectory in trajectories):
        message.turn_offsets.extend(_offsets(len(trajectory.turns) for trajectory in trajectories))
        message.turn_node.extend(turn.node for turn in turns)
    if any(turn.number or turn.branch or turn.untrained for turn in turns):
        message.turn_number.extend(turn.number for turn in turns)
        message.turn_branch.extend(turn.branch for turn in turns)
        message.turn_untrained.extend(turn.untrained for turn in turns)
    if any(t.status is not STATUS_AFTER[t.finish_reason] for t in trajectories):
        message.status.extend(_STATUS_TO_WIRE[trajectory.status] for trajectory in trajectories)
    if any(trajectory.reason for trajectory in trajectories):
        message.reason.extend(trajectory.reason for trajectory in trajectories)
    if any(trajectory.messages or trajectory.environment for trajectory in trajectories):
        message.conversation.extend(map(_encode_conversation, trajectories))
    return message


def decode_trajectories(message: types_pb2.Trajectories) -> list[Trajectory]:
    """Raises ValueError for columns that do not fit together, log-probabilities that are not finite, token
    ids below 0, unknown finish reasons, tokens of the policy that no span covers or other tokens that one
    does, parents and turns that make no tree, and rewards for a node that no turn produced."""
    nodes, turns = _decode_nodes(message), _decode_turns(message)
    num = len(message.group)
    turn_ranges = list(_ranges(message.turn_offsets or range(num + 1), len(turns)))
    if any(first == end for first, end in turn_ranges):
        raise ValueError("samples: one of no turn, expected one or more of each")
    trajectories = [
        Trajectory(
            SampleId(group, index),
            attempt,
            tuple(nodes[first:last]),
            tuple(turns[begin:end]),
            status,
            decode_rewards(rewards) if rewards else (),
            reason,
        )
        for group, index, attempt, (first, last), (begin, end), status, rewards, reason in zip(
            _look_up([decode_group_id(group) for group in message.groups], message.group),
            message.index[:],
            message.attempt[:],
            _ranges(message.node_offsets, len(nodes)),
            turn_ranges,
            _look_up(_STATUSES, message.status)
            if message.status
            else [STATUS_AFTER[turns[end - 1].finish_reason] for _, end in turn_ranges],
            message.rewards or repeat(None, num),
            message.reason[:] or repeat("", num),
            strict=True,
        )
    ]
    is_single = message.node_offsets == [*range(num + 1)] and message.node_parent == [BELOW_PROMPT] * num
    if message.turn_offsets or message.rewards or not is_single:
        for trajectory in trajectories:
            _check_tree(trajectory)
    if message.conversation:
        trajectories = [
            trajectory._replace(
                messages=tuple(map(decode_message, of.messages)), environment=dict(of.environment)
            )
            for trajectory, of in zip(trajectories, message.conversation, strict=True)
        ]
    return trajectories


def _decode_nodes(message: types_pb2.Trajectories) -> list[Node]:
    """Of all trajectories, one after the other."""
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
    span_version = _look_up(versions, message.span_version)
    spans = list(
        starmap(VersionSpan, zip(span_version, message.span_start[:], message.span_end[:], strict=True))
    )
    nodes = [
        Node(
            parent,
            token_ids[start:end],
            loss_mask[start:end],
            logprobs[start:end],
            tuple(spans[first:last]),
            routes,
        )
        for parent, (start, end), (first, last), routes in zip(
            message.node_parent[:],
            _ranges(message.token_offsets, num_tokens),
            _ranges(message.span_offsets, len(spans)),
            _decode_routes(message),
            strict=True,
        )
    ]
    all_produced = bool(loss_mask.all())
    for node in nodes:
        _check_spans(node, all_produced)
    return nodes


def _decode_routes(message: types_pb2.Trajectories) -> Iterable[Routes | None]:
    """Of each node; None: nothing is recorded."""
    if not message.route_offsets:
        return repeat(None, len(message.node_parent))
    routes = decode_routes(message.routes)
    ranges = _ranges(message.route_offsets, len(routes))
    return [routes[first:end] if end > first else None for first, end in ranges]


def _decode_turns(message: types_pb2.Trajectories) -> list[Turn]:
    """Of all trajectories, one after the other."""
    num = len(message.group)
    origins = [Origin(origin.replica, origin.incarnation) for origin in message.origins]
    others = message.turn_number, message.turn_branch, message.turn_untrained
    columns = [column[:] for column in others] if any(others) else []
    return list(
        starmap(
            Turn,
            zip(
                message.turn_node[:] if message.turn_offsets else [0] * num,
                _check_reasons(message.finish_reason[:]),
                message.text[:],
                _look_up(origins, message.origin),
                message.started[:],
                message.finished[:],
                *columns,
                strict=True,
            ),
        )
    )


def _check_tree(trajectory: Trajectory) -> None:
    nodes, produced = trajectory.nodes, {turn.node for turn in trajectory.turns}
    if not all(NEW_CONVERSATION <= node.parent < number for number, node in enumerate(nodes)):
        raise ValueError(f"sample {trajectory.id}: a node whose parent is no earlier node of the sample")
    if not all(0 <= node < len(nodes) for node in produced):
        raise ValueError(
            f"sample {trajectory.id}: turns that produced nodes {sorted(produced)}, expected some of its "
            f"{len(nodes)}"
        )
    if unknown := {reward.node for reward in trajectory.rewards} - produced - {WHOLE}:
        raise ValueError(
            f"sample {trajectory.id}: rewards for nodes {sorted(unknown)}, expected {WHOLE} or what a turn "
            f"produced: {sorted(produced)}"
        )


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


def _check_spans(node: Node, all_produced: bool) -> None:
    """They follow one another, and cover what the policy produced. `all_produced`: that is every token of the
    message."""
    at, length = 0, len(node.token_ids)
    if all_produced and len(node.spans) == 1 and node.spans[0][1:] == (0, length):
        return  # as most do
    covered = np.zeros(length, np.bool_)
    for span in node.spans:
        if not at <= span.start <= span.end <= length:
            raise ValueError(
                f"samples: span [{span.start}, {span.end}) of a node of {length} tokens, expected one "
                f"between {at} and {length}"
            )
        covered[span.start : span.end] = True
        at = span.end
    if len(wrong := np.flatnonzero(covered != node.loss_mask)):
        raise ValueError(
            f"samples: token {wrong[0]} of a node of {length} is "
            + (
                "in a span, and the policy did not produce it"
                if covered[wrong[0]]
                else "in no span, and the policy produced it"
            )
        )


def _ranges(offsets: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each row, which together cover [0, size)."""
    ends = list(offsets)  # reading a message's column again and again costs more
    if not ends or ends[0] != 0 or ends[-1] != size or ends != sorted(ends):
        raise ValueError(f"samples: offsets {_head(ends)}, expected them to ascend from 0 to {size}")
    return pairwise(ends)


def _look_up(table: Sequence[T], numbers: Sequence[int]) -> Iterator[T]:
    numbers = numbers[:]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
        raise ValueError(f"samples: entries {_head(numbers)} of a table of {len(table)}")
    return map(table.__getitem__, numbers)


def _check_reasons(reasons: Sequence[types_pb2.FinishReason.ValueType]) -> Sequence[FinishReason]:
    if unknown := set(reasons) - _REASON_FROM_WIRE.keys():
        raise ValueError(f"samples: unknown finish reasons {sorted(unknown)}")
    return [_REASON_FROM_WIRE[reason] for reason in reasons]


def _head(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}{' ...' if len(numbers) > 8 else ''}"


def _encode_conversation(trajectory: Trajectory) -> types_pb2.Conversation:
    return types_pb2.Conversation(
        messages=map(encode_message, trajectory.messages), environment=trajectory.environment
    )


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


def decode_payload(content: bytes) -> list[Trajectory]:
    """Finished trajectories as they arrive and as the journal keeps them. Raises ValueError as
    `decode_trajectories` does, and for content that is no such message."""
    return decode_trajectories(parse_trajectories(content))


def parse_trajectories(content: bytes) -> types_pb2.Trajectories:
    """Raises ValueError for anything else."""
    try:
        return types_pb2.Trajectories.FromString(content)
    except DecodeError as error:
        raise ValueError(f"samples: {error}") from None


def encode_payload(samples: Iterable[Trajectory]) -> bytes:
    return encode_trajectories(samples).SerializeToString()
