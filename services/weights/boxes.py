"""Boxes in flat buffers: views, copies with checksums of the result, checksums of whole tensors.

A box that never leaves devices is checksummed there (`device_checksum`), any other box on the host (xxh3-64).
The memory that holds a part in transit decides which, so both ends of a transport agree.

Letters in shapes: R rows, C columns of a box; N boxes; W words of 32 bits.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from atoll.wire.types import ShardLayout, UInt64

CHUNK_BYTES = 1 << 20  # copied and hashed together, while in a core's L2 cache
NUM_FACTORS = 1 << 20  # words that a device sums together: their factors, 8 MiB, stay in its L2 cache


def box_view(
    buffer: torch.Tensor, rows: int, columns: int, offset: int, stride: int | None = None
) -> torch.Tensor:
    """[R, C] view of a flat buffer; offset and stride in elements, dense without stride."""
    begin = buffer.storage_offset() + offset  # as_strided counts from the beginning of the storage
    return buffer.as_strided((rows, columns), (columns if stride is None else stride, 1), begin)


def side_views(buffers: Sequence[torch.Tensor], transfers: NDArray[np.void], side: str) -> list[torch.Tensor]:
    """Each transfer's view of the process's buffers, on side "source" or "target"."""
    columns = [f"{side}_buffer", "rows", "columns", f"{side}_offset", f"{side}_stride"]
    return [box_view(buffers[buffer], *place) for buffer, *place in transfers[columns].tolist()]


def stream_views(part: torch.Tensor, transfers: NDArray[np.void], dtype: torch.dtype) -> list[torch.Tensor]:
    """The view of each transfer in the part [bytes] of `dtype`."""
    elements = part.view(dtype)
    places = transfers[["rows", "columns", "stream"]].copy()
    places["stream"] -= places["stream"][:1]
    return [box_view(elements, *place) for place in places.tolist()]


def checksum(box_RC: torch.Tensor, dtype: torch.dtype) -> int:
    """xxh3-64 of the box's bytes in `dtype`, row-major; `device_checksum` of them if it is on a device."""
    if box_RC.is_cuda:
        return _unsigned(device_checksum(box_RC.to(dtype)))
    hasher = xxhash.xxh3_64()
    for rows in _chunks(box_RC, dtype):
        # a copy even without a cast: memory exposed to numpy cannot be freed in place
        hasher.update(_bytes(box_RC[rows].to(dtype, copy=True)))
    return hasher.intdigest()


def copy_boxes(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> UInt64:
    """Copies with a cast; returns each target box's checksum [N] after the copy, row-major."""
    if not into or not (into[0].is_cuda and sources[0].is_cuda):
        return np.array([_copy(*pair) for pair in zip(into, sources, strict=True)], np.uint64)
    sums = [device_checksum(box.copy_(source)) for box, source in zip(into, sources, strict=True)]
    return torch.stack(sums).cpu().numpy().view(np.uint64)  # waits for the device once


def _copy(into_RC: torch.Tensor, from_RC: torch.Tensor) -> int:
    if into_RC.is_cuda:
        into_RC.copy_(from_RC)
        return checksum(from_RC, into_RC.dtype)  # of the box on the host, as it travels
    if into_RC.nbytes <= CHUNK_BYTES:  # most tensors of a small model: no need for views of chunks
        return xxhash.xxh3_64_intdigest(_bytes(into_RC.copy_(from_RC)))
    hasher = xxhash.xxh3_64()
    for rows in _chunks(into_RC, into_RC.dtype):
        hasher.update(_bytes(into_RC[rows].copy_(from_RC[rows])))
    return hasher.intdigest()


def device_checksum(box_RC: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the box's device: sum of word * factor modulo 2**64 over the row-major bytes.

    Words are 32 bits, read as signed (missing bytes are 0); factor i is output i of SplitMix64 from seed 0.
    Longer boxes are summed in blocks of NUM_FACTORS words, and then the words of the blocks' sums. If the
    factors were random, two different boxes of one size would collide at each of the (one or two) levels with
    a probability of at most 2**-33: words differ by less than 2**32, so the difference of some word is an odd
    number times 2**t, t < 32, and one in 2**(64 - t) values of its factor hides it. If the lowest bit of some
    word differs, that is 2**-64.
    """
    flat = box_RC.contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words_W = flat.view(torch.int32)
    factors = _factors(box_RC.device)
    whole = len(words_W) // NUM_FACTORS * NUM_FACTORS
    blocks = (words_W[:whole].view(-1, NUM_FACTORS) * factors).sum(1)
    rest = (words_W[whole:] * factors[: len(words_W) - whole]).sum()
    return device_checksum(torch.cat([blocks, rest[None]])) if whole else rest


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """int64 [NUM_FACTORS] SplitMix64 from seed 0 (Steele, Lea, Flood 2014), on devices that sum boxes."""
    z = np.arange(1, NUM_FACTORS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64)).to(device)


def _unsigned(sum_: torch.Tensor) -> int:
    return int(sum_) % 2**64


def tensor_checksums(
    shard_layout: ShardLayout, buffers: Sequence[torch.Tensor], dtype: torch.dtype
) -> dict[str, int]:
    """xxh3-64 of each canonical tensor's bytes in `dtype`, row-major; the shard layout holds whole
    tensors.
    """
    checksums = {}
    for t, name in enumerate(shard_layout.tensors):
        boxes = shard_layout.boxes[shard_layout.boxes["tensor"] == t]
        shape = [
            int((boxes[at] + boxes[size]).max()) for at, size in (("row", "rows"), ("column", "columns"))
        ]
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes.tolist():
            _, row, rows, column, columns, buffer, offset, stride = box
            view = box_view(buffers[buffer], rows, columns, offset, stride)
            whole[row : row + rows, column : column + columns] = view  # in host memory
        checksums[name] = checksum(whole, dtype)
    return checksums


def _bytes(box_RC: torch.Tensor) -> memoryview:
    return box_RC.contiguous().view(torch.uint8).numpy().data


def _chunks(box_RC: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    at_once = max(1, CHUNK_BYTES // (box_RC.shape[1] * dtype.itemsize))
    return [slice(row, row + at_once) for row in range(0, box_RC.shape[0], at_once)]
