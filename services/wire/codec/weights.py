"""Shards, plans and pushed versions <-> messages of trainer and rollout. Pure."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.wire.codec.values import decode_version, encode_version
from atoll.wire.types import (
    BOX,
    TRANSFER,
    LoraSpec,
    Membership,
    Plan,
    PublishedPart,
    PublishRequest,
    PushPart,
    ReceiverSetup,
    ShardLayout,
    StreamManifest,
    Version,
)
from atoll.wire.v1 import rollout_pb2, trainer_pb2, types_pb2, worker_pb2

MAX_INFLATED_BYTES = 512 << 20  # of decompressed boxes: five times those of the largest plan that was made


def encode_box_table(tensors: Sequence[str], rows: NDArray[np.void]) -> types_pb2.BoxTable:
    """A structured array of integers as columns, in the order of its fields. They are so regular that a plan
    of 825,000 transfers, 94 MiB, becomes 6 (benchmarks/plan_scale.py)."""
    assert rows.dtype.names is not None
    names = "".join(f"{tensor}\0" for tensor in tensors).encode()
    columns = b"".join(rows[name].astype("<i8").tobytes() for name in rows.dtype.names)
    return types_pb2.BoxTable(tensors=zlib.compress(names, 1), columns=zlib.compress(columns, 1))


def decode_box_table(
    message: types_pb2.BoxTable, dtype: np.dtype[np.void]
) -> tuple[tuple[str, ...], NDArray[np.void]]:
    assert dtype.names is not None
    columns = np.frombuffer(_inflate(message.columns), "<i8").reshape(len(dtype.names), -1)
    rows = np.empty(columns.shape[1], dtype)
    for name, column in zip(dtype.names, columns, strict=True):
        rows[name] = column
    return tuple(_inflate(message.tensors).decode().split("\0")[:-1]), rows


def _inflate(data: bytes) -> bytes:
    """Raises ValueError for what is not zlib's, or larger than any boxes are."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(data, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise ValueError(f"boxes: {error}") from None
    if not stream.eof:
        raise ValueError(f"boxes: cut off, or more than {MAX_INFLATED_BYTES:,} bytes when decompressed")
    return content


def encode_shard_layout(shard_layout: ShardLayout) -> types_pb2.BoxTable:
    return encode_box_table(shard_layout.tensors, shard_layout.boxes)


def decode_shard_layout(message: types_pb2.BoxTable) -> ShardLayout:
    """Raises ValueError for boxes of tensors that it does not name."""
    names, boxes = decode_box_table(message, BOX)
    if len(boxes) and not 0 <= boxes["tensor"].min() <= boxes["tensor"].max() < len(names):
        raise ValueError(f"boxes: a tensor that is not among the {len(names)} named")
    return ShardLayout(names, boxes)


def encode_plan(plan: Plan) -> types_pb2.Plan:
    return types_pb2.Plan(id=plan.id, transfers=encode_box_table(plan.tensors, plan.transfers))


def decode_plan(message: types_pb2.Plan) -> Plan:
    return Plan(message.id, *decode_box_table(message.transfers, TRANSFER))


def encode_stream(stream: StreamManifest) -> types_pb2.StreamManifest:
    return types_pb2.StreamManifest(
        source=stream.source,
        location=stream.location,
        offset=stream.offset,
        plan_id=stream.plan_id,
        num_bytes=stream.num_bytes,
        part=stream.part,
        checksum=stream.checksum,
        delta=stream.delta,
    )


def decode_stream(message: types_pb2.StreamManifest) -> StreamManifest:
    return StreamManifest(
        source=message.source,
        location=message.location,
        offset=message.offset,
        plan_id=message.plan_id,
        num_bytes=message.num_bytes,
        part=message.part,
        checksum=message.checksum,
        delta=message.delta,
    )


def encode_membership(membership: Membership) -> types_pb2.Membership:
    return types_pb2.Membership(
        epoch=membership.epoch, num_members=membership.num_members, member=membership.member
    )


def decode_membership(message: types_pb2.Membership) -> Membership:
    return Membership(message.epoch, message.num_members, message.member)


def encode_push_part(part: PushPart) -> rollout_pb2.ReceiveWeightsRequest:
    return rollout_pb2.ReceiveWeightsRequest(
        version=encode_version(part.version),
        streams=[encode_stream(stream) for stream in part.streams],
        plan=None if part.plan is None else encode_plan(part.plan),
        membership=encode_membership(part.membership),
    )


def decode_push_part(message: rollout_pb2.ReceiveWeightsRequest) -> PushPart:
    return PushPart(
        version=decode_version(message.version),
        streams=[decode_stream(stream) for stream in message.streams],
        plan=decode_plan(message.plan) if message.HasField("plan") else None,
        membership=decode_membership(message.membership),
    )


def encode_publish(role: str, request: PublishRequest) -> trainer_pb2.PublishWeightsRequest:
    return trainer_pb2.PublishWeightsRequest(
        role=role,
        version=encode_version(request.version),
        dtype=request.dtype,
        plan_ids=list(request.members),
        members=[encode_membership(membership) for membership in request.members.values()],
        plans=[encode_plan(plan) for plan in request.new_plans],
        part=request.part,
    )


def decode_publish(message: trainer_pb2.PublishWeightsRequest) -> PublishRequest:
    """The role that the message names beside it is for the service."""
    members = map(decode_membership, message.members)
    return PublishRequest(
        version=decode_version(message.version),
        dtype=message.dtype,
        members=dict(zip(message.plan_ids, members, strict=True)),
        new_plans=[decode_plan(plan) for plan in message.plans],
        part=message.part,
    )


def encode_published(published: PublishedPart) -> trainer_pb2.PublishWeightsReply:
    return trainer_pb2.PublishWeightsReply(
        streams=[encode_stream(stream) for stream in published.streams],
        num_bytes=published.num_bytes,
        last=published.last,
    )


def decode_published(message: trainer_pb2.PublishWeightsReply) -> PublishedPart:
    streams = tuple(decode_stream(stream) for stream in message.streams)
    return PublishedPart(streams, message.num_bytes, message.last)


def encode_attach(version: Version, setup: ReceiverSetup) -> worker_pb2.AttachRequest:
    lora = setup.lora
    return worker_pb2.AttachRequest(
        version=encode_version(version),
        transport=setup.transport,
        deadline_s=setup.deadline_s,
        staging=setup.staging,
        lora=None
        if lora is None
        else worker_pb2.Lora(rank=lora.rank, alpha=lora.alpha, targets=lora.targets),
        takes_turns=setup.takes_turns,
    )


def decode_attach(message: worker_pb2.AttachRequest) -> tuple[Version, ReceiverSetup]:
    lora = message.lora if message.HasField("lora") else None
    return decode_version(message.version), ReceiverSetup(
        transport=message.transport,
        deadline_s=message.deadline_s,
        staging=message.staging,
        lora=None if lora is None else LoraSpec(lora.rank, lora.alpha, tuple(lora.targets)),
        takes_turns=message.takes_turns,
    )
