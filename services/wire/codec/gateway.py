"""Agent sessions and their records in the store <-> messages. Pure."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from atoll.wire.codec.rewards import decode_message, encode_message
from atoll.wire.codec.rollout import decode_sampling, encode_sampling
from atoll.wire.codec.trajectories import decode_trajectories, encode_trajectories
from atoll.wire.codec.values import decode_group_id, encode_group_id
from atoll.wire.info import SessionSummary
from atoll.wire.types import SampleId, SessionId, SessionLimits, SessionReward, SessionSpec, TurnRecord
from atoll.wire.v1 import gateway_pb2

M = TypeVar("M")


def _read(what: str, read: Callable[[bytes], M], content: bytes) -> M:
    try:
        return read(content)
    except DecodeError as error:
        raise ValueError(f"{what}: {error}") from None


def encode_session_id(id: SessionId) -> gateway_pb2.SessionId:
    return gateway_pb2.SessionId(
        group=encode_group_id(id.sample.group), index=id.sample.index, attempt=id.attempt
    )


def decode_session_id(message: gateway_pb2.SessionId) -> SessionId:
    return SessionId(SampleId(decode_group_id(message.group), message.index), message.attempt)


def encode_session_spec(spec: SessionSpec) -> gateway_pb2.SessionSpec:
    return gateway_pb2.SessionSpec(
        id=encode_session_id(spec.id),
        agent_key=spec.agent_key,
        reward_key=spec.reward_key,
        sampling=encode_sampling(spec.sampling),
        max_turns=spec.limits.turns,
        max_tokens=spec.limits.tokens,
    )


def decode_session_spec(message: gateway_pb2.SessionSpec) -> SessionSpec:
    return SessionSpec(
        decode_session_id(message.id),
        message.agent_key,
        message.reward_key,
        decode_sampling(message.sampling),
        SessionLimits(message.max_turns, message.max_tokens),
    )


def dump_session_spec(spec: SessionSpec) -> bytes:
    """As the store keeps it."""
    return encode_session_spec(spec).SerializeToString()


def parse_session_spec(content: bytes) -> SessionSpec:
    """Raises ValueError for anything else."""
    return decode_session_spec(_read("session", gateway_pb2.SessionSpec.FromString, content))


def encode_session_reward(reward: SessionReward) -> gateway_pb2.SessionReward:
    number, branch = reward.turn or (0, 0)
    return gateway_pb2.SessionReward(
        component=reward.component,
        value=reward.value,
        of_turn=reward.turn is not None,
        turn=number,
        branch=branch,
    )


def decode_session_reward(message: gateway_pb2.SessionReward) -> SessionReward:
    turn = (message.turn, message.branch) if message.of_turn else None
    return SessionReward(message.component, message.value, turn)


def dump_session_reward(reward: SessionReward) -> bytes:
    """As the store keeps it."""
    return encode_session_reward(reward).SerializeToString()


def parse_session_reward(content: bytes) -> SessionReward:
    """Raises ValueError for anything else."""
    return decode_session_reward(_read("reward", gateway_pb2.SessionReward.FromString, content))


def encode_turn_record(record: TurnRecord) -> gateway_pb2.TurnRecord:
    return gateway_pb2.TurnRecord(
        number=record.number,
        request=record.request,
        parent=record.parent,
        parent_branch=record.parent_branch,
        head=record.head,
        has_tools=record.has_tools,
        inserted_ids=record.inserted_ids.astype("<i4", copy=False).tobytes(),
        messages=map(encode_message, record.messages),
        cause=record.cause,
        drawn=encode_trajectories(record.drawn),
        chains=record.chains,
    )


def decode_turn_record(message: gateway_pb2.TurnRecord) -> TurnRecord:
    """Raises ValueError as `decode_trajectories` does, and unless each turn drawn has a chain."""
    drawn = tuple(decode_trajectories(message.drawn))
    if len(drawn) != len(message.chains):
        raise ValueError(f"a record of {len(drawn)} turns and {len(message.chains)} chains, expected as many")
    return TurnRecord(
        number=message.number,
        request=message.request,
        parent=message.parent,
        parent_branch=message.parent_branch,
        head=message.head,
        has_tools=message.has_tools,
        inserted_ids=np.frombuffer(message.inserted_ids, "<i4"),
        messages=tuple(map(decode_message, message.messages)),
        cause=message.cause,
        drawn=drawn,
        chains=tuple(message.chains),
    )


def dump_turn_record(record: TurnRecord) -> bytes:
    """As the store keeps it."""
    return encode_turn_record(record).SerializeToString()


def parse_turn_record(content: bytes) -> TurnRecord:
    """Raises ValueError for anything else."""
    return decode_turn_record(_read("turn record", gateway_pb2.TurnRecord.FromString, content))


def encode_session_summary(summary: SessionSummary) -> gateway_pb2.SessionSummary:
    return gateway_pb2.SessionSummary(
        id=encode_session_id(summary.id),
        turns=summary.turns,
        tokens=summary.tokens,
        opened=summary.opened,
        branches=summary.branches,
        recomputed=summary.recomputed,
    )


def decode_session_summary(message: gateway_pb2.SessionSummary) -> SessionSummary:
    return SessionSummary(
        decode_session_id(message.id),
        message.turns,
        message.tokens,
        message.opened,
        dict(message.branches),
        message.recomputed,
    )
