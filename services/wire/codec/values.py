"""Tensors, versions and group ids <-> messages: shared by all boundaries. Pure, as every module here: one
encode and one decode per type, side by side."""

import numpy as np
from numpy.typing import NDArray

from atoll.wire.types import GroupId, Routes, Version
from atoll.wire.v1 import types_pb2


def encode_tensor(array: NDArray[np.generic]) -> types_pb2.Tensor:
    message = types_pb2.Tensor()
    put_tensor(message, array)
    return message


# put_...: into a message that is part of another. One that is given to the other's constructor is serialized
# and parsed again, which costs more than all else that is done for a batch or a response.


def put_tensor(message: types_pb2.Tensor, array: NDArray[np.generic]) -> None:
    message.dtype = array.dtype.name
    message.shape.extend(array.shape)
    message.data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_tensor(message: types_pb2.Tensor) -> NDArray[np.generic]:
    """A read-only view of the message's bytes. Raises ValueError if size and shape disagree."""
    dtype = np.dtype(message.dtype).newbyteorder("<")
    return np.frombuffer(message.data, dtype).reshape(tuple(message.shape))


def decode_routes(message: types_pb2.Tensor) -> Routes:
    """Raises ValueError for another tensor than [tokens, layers, experts of a token]."""
    if message.dtype not in ("uint8", "int16") or len(message.shape) != 3:
        raise ValueError(
            f"routes of dtype {message.dtype!r} and shape {list(message.shape)}, expected uint8 or int16 and "
            "[tokens, layers, experts of a token]"
        )
    return np.frombuffer(message.data, message.dtype).reshape(tuple(message.shape))


def encode_version(version: Version) -> types_pb2.Version:
    return types_pb2.Version(lineage=version.lineage, number=version.number)


def decode_version(message: types_pb2.Version) -> Version:
    return Version(message.lineage, message.number)


def encode_group_id(group: GroupId) -> types_pb2.GroupId:
    return types_pb2.GroupId(run=group.run, epoch=group.epoch, prompt=group.prompt)


def decode_group_id(message: types_pb2.GroupId) -> GroupId:
    return GroupId(message.run, message.epoch, message.prompt)
