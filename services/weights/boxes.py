"""Boxes in flat buffers: views, copies that checksum what they wrote, checksums of whole tensors.

Letters in shapes: R rows, C columns of a box.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from services.wire.types import Catalog

CHUNK_BYTES = 1 << 20  # copied and hashed at once: stays in a core's L2 cache in between


def box_view(
    buffer: torch.Tensor, rows: int, columns: int, offset: int, stride: int | None = None
) -> torch.Tensor:
    """[R, C] view of a flat buffer; offset and stride in elements, dense where there is no stride."""
    begin = buffer.storage_offset() + offset  # as_strided counts from the storage's beginning
    return buffer.as_strided((rows, columns), (columns if stride is None else stride, 1), begin)


def side_views(buffers: Sequence[torch.Tensor], transfers: NDArray[np.void], side: str) -> list[torch.Tensor]:
    """Where each transfer begins (side "source") or ends (side "target") in the process's buffers."""
    columns = [f"{side}_buffer", "rows", "columns", f"{side}_offset", f"{side}_stride"]
    return [box_view(buffers[buffer], *place) for buffer, *place in transfers[columns].tolist()]


def stream_views(stream: torch.Tensor, transfers: NDArray[np.void], dtype: torch.dtype) -> list[torch.Tensor]:
    """Where each transfer lies in its source's stream [bytes] of `dtype`."""
    elements = stream.view(dtype)
    return [box_view(elements, *place) for place in transfers[["rows", "columns", "stream"]].tolist()]


def checksum(box_RC: torch.Tensor, dtype: torch.dtype) -> int:
    """xxh3-64 of the box's bytes in `dtype`, row-major."""
    hasher = xxhash.xxh3_64()
    for rows in _chunks(box_RC, dtype):
        hasher.update(_bytes(box_RC[rows].to(dtype)))
    return hasher.intdigest()


def copy(into_RC: torch.Tensor, from_RC: torch.Tensor) -> int:
    """Copies, casting; returns xxh3-64 of what `into` holds afterwards, row-major."""
    if into_RC.nbytes <= CHUNK_BYTES:  # most tensors of a small model: no views of chunks
        return xxhash.xxh3_64_intdigest(_bytes(into_RC.copy_(from_RC)))
    hasher = xxhash.xxh3_64()
    for rows in _chunks(into_RC, into_RC.dtype):
        hasher.update(_bytes(into_RC[rows].copy_(from_RC[rows])))
    return hasher.intdigest()


def tensor_checksums(catalog: Catalog, buffers: Sequence[torch.Tensor], dtype: torch.dtype) -> dict[str, int]:
    """xxh3-64 of each canonical tensor's bytes in `dtype`, row-major; the catalog holds whole tensors."""
    checksums = {}
    for t, name in enumerate(catalog.tensors):
        boxes = catalog.boxes[catalog.boxes["tensor"] == t]
        shape = [
            int((boxes[at] + boxes[size]).max()) for at, size in (("row", "rows"), ("column", "columns"))
        ]
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes.tolist():
            _, row, rows, column, columns, buffer, offset, stride = box
            view = box_view(buffers[buffer], rows, columns, offset, stride)
            whole[row : row + rows, column : column + columns] = view
        checksums[name] = checksum(whole, dtype)
    return checksums


def _bytes(box_RC: torch.Tensor) -> memoryview:
    return box_RC.contiguous().view(torch.uint8).numpy().data


def _chunks(box_RC: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    at_once = max(1, CHUNK_BYTES // (box_RC.shape[1] * dtype.itemsize))
    return [slice(row, row + at_once) for row in range(0, box_RC.shape[0], at_once)]
