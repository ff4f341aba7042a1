"""Shards, plans and pushed versions <-> messages of trainer and rollout. Pure."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.wire.codec.values import decode_tensor, encode_tensor
from atoll.wire.types import BOX, TRANSFER, Catalog, Membership, Plan, Published, StreamManifest
from atoll.wire.v1 import trainer_pb2, types_pb2

MAX_INFLATED_BYTES = 512 << 20  # of decompressed boxes: five times those of the largest plan that was made


def encode_boxes(tensors: Sequence[str], rows: NDArray[np.void]) -> types_pb2.Boxes:
    """A structured array of integers as columns, in the order of its fields. They are so regular that a plan
    of 825,000 transfers, 94 MiB, becomes 6 (benchmarks/plan_scale.py)."""
    assert rows.dtype.names is not None
    names = "".join(f"{tensor}\0" for tensor in tensors).encode()
    columns = b"".join(rows[name].astype("<i8").tobytes() for name in rows.dtype.names)
    return types_pb2.Boxes(tensors=zlib.compress(names, 1), columns=zlib.compress(columns, 1))


def decode_boxes(
    message: types_pb2.Boxes, dtype: np.dtype[np.void]
) -> tuple[tuple[str, ...], NDArray[np.void]]:
    assert dtype.names is not None
    columns = np.frombuffer(_inflated(message.columns), "<i8").reshape(len(dtype.names), -1)
    rows = np.empty(columns.shape[1], dtype)
    for name, column in zip(dtype.names, columns, strict=True):
        rows[name] = column
    return tuple(_inflated(message.tensors).decode().split("\0")[:-1]), rows


def _inflated(data: bytes) -> bytes:
    """Raises ValueError for what is not zlib's, or larger than any boxes are."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(data, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise ValueError(f"boxes: {error}") from None
    if not stream.eof:
        raise ValueError(f"boxes: cut off, or more than {MAX_INFLATED_BYTES:,} bytes when decompressed")
    return content


def encode_catalog(catalog: Catalog) -> types_pb2.Boxes:
    return encode_boxes(catalog.tensors, catalog.boxes)


def decode_catalog(message: types_pb2.Boxes) -> Catalog:
    """Raises ValueError for boxes of tensors that it does not name."""
    names, boxes = decode_boxes(message, BOX)
    if len(boxes) and not 0 <= boxes["tensor"].min() <= boxes["tensor"].max() < len(names):
        raise ValueError(f"boxes: a tensor that is not among the {len(names)} named")
    return Catalog(names, boxes)


def encode_plan(plan: Plan) -> types_pb2.Plan:
    return types_pb2.Plan(id=plan.id, transfers=encode_boxes(plan.tensors, plan.transfers))


def decode_plan(message: types_pb2.Plan) -> Plan:
    return Plan(message.id, *decode_boxes(message.transfers, TRANSFER))


def encode_stream(stream: StreamManifest) -> types_pb2.StreamManifest:
    return types_pb2.StreamManifest(
        source=stream.source,
        location=stream.location,
        offset=stream.offset,
        plan_id=stream.plan_id,
        num_bytes=stream.num_bytes,
        first=stream.first,
        checksums=encode_tensor(stream.checksums),
        delta=stream.delta,
    )


def decode_stream(message: types_pb2.StreamManifest) -> StreamManifest:
    return StreamManifest(
        source=message.source,
        location=message.location,
        offset=message.offset,
        plan_id=message.plan_id,
        num_bytes=message.num_bytes,
        first=message.first,
        checksums=decode_tensor(message.checksums).astype(np.uint64, copy=False),
        delta=message.delta,
    )


def encode_membership(membership: Membership) -> types_pb2.Membership:
    return types_pb2.Membership(
        epoch=membership.epoch, num_members=membership.num_members, member=membership.member
    )


def decode_membership(message: types_pb2.Membership) -> Membership:
    return Membership(message.epoch, message.num_members, message.member)


def encode_published(published: Published) -> trainer_pb2.PublishWeightsReply:
    return trainer_pb2.PublishWeightsReply(
        streams=[encode_stream(stream) for stream in published.streams],
        num_bytes=published.num_bytes,
        last=published.last,
    )


def decode_published(message: trainer_pb2.PublishWeightsReply) -> Published:
    streams = tuple(decode_stream(stream) for stream in message.streams)
    return Published(streams, message.num_bytes, message.last)
