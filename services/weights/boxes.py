"""Boxes in flat buffers: views, copies into and out of a part in transit with its checksum, checksums of
whole tensors.

A part is one dense run of bytes. On a device it is checksummed there (`device_checksum`), on the host by
xxh3-64. The memory that holds it in transit decides, so both ends agree wherever they keep their boxes.

Letters in shapes: R rows, C columns of a box; N boxes; W words of 32 bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from atoll.wire.types import ShardLayout

CHUNK_BYTES = 1 << 20  # copied and hashed together, while in a core's L2 cache
NUM_FACTORS = 1 << 20  # words that a device sums together: their factors, 8 MiB, stay in its L2 cache
SUMMED_BLOCKS = 4  # blocks of words at once: the products take 32 MiB, whatever the size of the part

Launch = tuple[list[torch.Tensor], list[torch.Tensor]]  # boxes that are copied together: into, and from


def box_view(
    buffer: torch.Tensor, rows: int, columns: int, offset: int, stride: int | None = None
) -> torch.Tensor:
    """[R, C] view of a flat buffer; offset and stride in elements, dense without stride."""
    begin = buffer.storage_offset() + offset  # as_strided counts from the beginning of the storage
    if stride is None or rows == 1:  # a fused copy needs equal strides, also of boxes of one row
        stride = columns
    return buffer.as_strided((rows, columns), (stride, 1), begin)


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


def copy_part(part: torch.Tensor, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
    """Copies boxes, with a cast, into the part [bytes] or out of it; returns the checksum of its bytes.

    `into` or `sources` are all of the part, in its order. The checksum is taken after the copy, so a part
    that its sender overwrites while it is read does not pass.
    """
    if part.is_cuda:
        copy_boxes(launches(into, sources))
        return int(device_checksum(part)) % 2**64
    hasher, memory, begin = xxhash.xxh3_64(), part.numpy().data, 0
    for chunk in _chunks(into, sources):
        copy_boxes([chunk])
        end = begin + sum(box.nbytes for box in chunk[0])
        hasher.update(memory[begin:end])
        begin = end
    return hasher.intdigest()


def copy_boxes(launches: Iterable[Launch], *, wait: bool = True) -> None:
    """Without `wait`, copies from pinned memory into a device may still run: they follow its stream."""
    for into, sources in launches:
        torch._foreach_copy_(into, sources, non_blocking=not wait)


def launches(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[Launch]:
    """Groups the copies that a device can fuse. All others are a group of their own, since a single one of
    them would have it copy one by one."""
    groups: dict[object, Launch] = {}
    for box, source in zip(into, sources, strict=True):
        dense = all(side.is_cuda and side.is_contiguous() for side in (box, source))
        group = groups.setdefault((source.device, source.dtype) if dense else None, ([], []))
        group[0].append(box)
        group[1].append(source)
    return list(groups.values())


def _chunks(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Iterator[Launch]:
    """Boxes of about CHUNK_BYTES together, in order; larger ones are cut between rows."""
    chunk: Launch = [], []
    num_bytes = 0
    for box, source in zip(into, sources, strict=True):
        rows = max(1, CHUNK_BYTES * len(box) // box.nbytes)
        pairs = [(box, source)]
        if rows < len(box):
            pairs = list(zip(torch.split(box, rows), torch.split(source, rows), strict=True))
        for pair in pairs:
            for side, piece in zip(chunk, pair, strict=True):
                side.append(piece)
            num_bytes += pair[0].nbytes
            if num_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = ([], []), 0
    if num_bytes:
        yield chunk


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
    blocks = torch.split(words_W[:whole].view(-1, NUM_FACTORS), SUMMED_BLOCKS)
    sums = [(some * factors).sum(1) for some in blocks]
    rest = (words_W[whole:] * factors[: len(words_W) - whole]).sum()
    return device_checksum(torch.cat([*sums, rest[None]])) if whole else rest


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """int64 [NUM_FACTORS] SplitMix64 from seed 0 (Steele, Lea, Flood 2014), on devices that sum boxes."""
    z = np.arange(1, NUM_FACTORS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64)).to(device)


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
        checksums[name] = xxhash.xxh3_64_intdigest(whole.view(torch.uint8).numpy().data)
    return checksums
