"""Which trainer rank sends which box of which tensor to which rank of a replica. Pure numpy.

Worked example: `w` [4, 6] lies as rows 0-1 on trainer rank 0 and rows 2-3 on rank 1 (TP2), each with a
data-parallel copy on ranks 2 and 3; the replica (TP1) keeps it whole. Ranks 0 and 2 hold the same two
rows, so 0 sends row 0 and 2 sends row 1; likewise 1 and 3: four transfers of one row.

Letters in shapes: H boxes that the sources hold, W boxes that the targets want, D distinct boxes of H,
P pairs of a distinct and a wanted box that meet, N transfers.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from services.wire.types import BOX, TRANSFER, Catalog, Int64, Plan

Boxes = NDArray[np.void]
_RANKED = np.dtype([("rank", np.int32), *BOX.descr])


def plan(sources: Sequence[Catalog], targets: Sequence[Catalog]) -> Plan:
    """Transfers from the trainer's ranks to the tensor-parallel ranks of one replica class.

    Every element that a target keeps arrives exactly once. Ranks that hold the same boxes share the
    sending: each sends an equal part of the elements, to within one row. The boxes that sources hold
    of a tensor must be equal or disjoint. Raises ValueError naming a tensor for which this fails.
    """
    tensors = tuple(dict.fromkeys(name for catalog in targets for name in catalog.tensors))
    for name in {name for catalog in sources for name in catalog.tensors} - set(tensors):
        raise ValueError(f"the trainer holds {name!r}, which no replica keeps: both must load the same model")
    held_H, wanted_W = _ranked(sources, tensors), _ranked(targets, tensors)
    held_H = held_H[
        np.lexsort([held_H[key] for key in ("rank", "columns", "rows", "column", "row", "tensor")])
    ]
    first_D, copies_D = _distinct(held_H)
    _check_shapes(held_H, wanted_W, tensors)
    _check_disjoint(held_H[first_D], tensors)

    d_P, w_P = _pairs(held_H["tensor"][first_D], wanted_W["tensor"])
    met_P = _intersect(held_H[first_D][d_P], wanted_W[w_P])
    _check_covered(met_P, w_P, wanted_W, tensors)
    keep = met_P["rows"] > 0
    d_P, w_P, met_P = d_P[keep], w_P[keep], met_P[keep]

    senders_D = _sets_of_ranks(held_H["rank"], first_D)
    pair_N, copy_N, row_N, rows_N = _share(met_P, wanted_W["rank"][w_P], senders_D[d_P], copies_D[d_P])
    met_N = met_P[pair_N]
    met_N["row"], met_N["rows"] = met_N["row"] + row_N, rows_N
    transfers_N = _transfers(met_N, held_H[first_D[d_P[pair_N]] + copy_N], wanted_W[w_P[pair_N]])
    digest = xxhash.xxh3_128(transfers_N.tobytes())
    digest.update("\0".join(tensors).encode())
    return Plan(digest.hexdigest(), tensors, transfers_N)


def _ranked(catalogs: Sequence[Catalog], tensors: tuple[str, ...]) -> Boxes:
    """All catalogs' boxes with their rank, numbered by `tensors` and sorted by tensor."""
    number = {name: i for i, name in enumerate(tensors)}
    parts = []
    for rank, catalog in enumerate(catalogs):
        part = np.empty(len(catalog.boxes), _RANKED)
        part["rank"] = rank
        for name in BOX.names or ():
            part[name] = catalog.boxes[name]
        part["tensor"] = np.array([number[name] for name in catalog.tensors], np.int32)[part["tensor"]]
        parts.append(part)
    boxes = np.concatenate(parts)
    return boxes[np.argsort(boxes["tensor"], kind="stable")]


def _distinct(sorted_H: Boxes) -> tuple[Int64, Int64]:
    """Where each distinct box begins in the sorted boxes, and how many ranks hold it; both [D]."""
    changed_H = np.ones(len(sorted_H), bool)
    keys = ("tensor", "row", "column", "rows", "columns")
    changed_H[1:] = np.any([np.diff(sorted_H[key]) != 0 for key in keys], axis=0)
    first_D = np.flatnonzero(changed_H)
    return first_D, np.diff(first_D, append=len(sorted_H))


def _pairs(a: NDArray[np.int32], b: NDArray[np.int32]) -> tuple[Int64, Int64]:
    """All (i, j) with a[i] == b[j]; `b` ascends."""
    begin = np.searchsorted(b, a, "left")
    count = np.searchsorted(b, a, "right") - begin
    i = np.repeat(np.arange(len(a)), count)
    return i, np.arange(len(i)) - (np.cumsum(count) - count - begin)[i]


def _intersect(a: Boxes, b: Boxes) -> Boxes:
    """The common part of each pair of boxes; rows 0 where there is none."""
    met = np.zeros(len(a), [(name, np.int64) for name in ("tensor", "row", "rows", "column", "columns")])
    met["tensor"] = a["tensor"]
    for start, size in (("row", "rows"), ("column", "columns")):
        met[start] = np.maximum(a[start], b[start])
        met[size] = np.minimum(a[start] + a[size], b[start] + b[size]) - met[start]
    met["rows"][(met["columns"] <= 0) | (met["rows"] < 0)] = 0
    return met


def _check_shapes(held_H: Boxes, wanted_W: Boxes, tensors: tuple[str, ...]) -> None:
    shapes = np.zeros((2, len(tensors), 2), np.int64)
    for side, boxes in enumerate((held_H, wanted_W)):
        np.maximum.at(shapes[side, :, 0], boxes["tensor"], boxes["row"] + boxes["rows"])
        np.maximum.at(shapes[side, :, 1], boxes["tensor"], boxes["column"] + boxes["columns"])
    for t in np.flatnonzero((shapes[0] != shapes[1]).any(axis=-1))[:1]:
        if not shapes[0, t].any():
            raise ValueError(f"the trainer does not hold {tensors[t]!r}, which the replicas keep")
        raise ValueError(
            f"{tensors[t]!r} is {shapes[0, t].tolist()} in the trainer and {shapes[1, t].tolist()} in the "
            "replicas: both must load the same model"
        )


def _check_disjoint(distinct_D: Boxes, tensors: tuple[str, ...]) -> None:
    i, j = _pairs(distinct_D["tensor"], distinct_D["tensor"])
    i, j = i[i < j], j[i < j]
    met = _intersect(distinct_D[i], distinct_D[j])
    for t in met["tensor"][met["rows"] > 0][:1]:
        raise ValueError(f"trainer ranks hold boxes of {tensors[t]!r} that overlap without being equal")


def _check_covered(met_P: Boxes, w_P: Int64, wanted_W: Boxes, tensors: tuple[str, ...]) -> None:
    """Held boxes are disjoint, so equal areas mean that each element is met once."""
    missing_W = wanted_W["rows"] * wanted_W["columns"]
    np.subtract.at(missing_W, w_P, met_P["rows"] * met_P["columns"])
    for w in np.flatnonzero(missing_W)[:1]:
        raise ValueError(
            f"{missing_W[w]} elements of {tensors[wanted_W['tensor'][w]]!r} that the replicas keep are on no "
            "trainer rank"
        )


def _sets_of_ranks(rank_H: NDArray[np.int32], first_D: Int64) -> Int64:
    """[D] a number for the set of ranks that hold each distinct box (a collision would only cost balance)."""
    token = np.random.default_rng(0).integers(2**63, size=rank_H.max() + 1, dtype=np.uint64)
    _, set_D = np.unique(np.add.reduceat(token[rank_H], first_D), return_inverse=True)
    return set_D.astype(np.int64)


def _share(
    met_P: Boxes, target_P: NDArray[np.int32], senders_P: Int64, copies_P: Int64
) -> tuple[Int64, Int64, Int64, Int64]:
    """Cuts the pairs by rows so that the ranks that hold the same boxes send equally much.

    What one set of k ranks can send is laid on a line of elements, by target; rank number i of the set
    sends the rows that begin in the line's i-th of k equal parts. Returns, per piece [N]: its pair,
    the number of the rank in the set, the first row within the pair's box, and rows.
    """
    line = np.lexsort((target_P, senders_P))
    size_P = met_P["rows"] * met_P["columns"]
    end = np.cumsum(size_P[line])
    start_P = np.empty_like(size_P)
    start_P[line] = end - size_P[line]
    total_S = np.bincount(senders_P, size_P).astype(np.int64)  # exact: below 2**53 elements
    start_P -= (np.cumsum(total_S) - total_S)[senders_P]
    total_P = total_S[senders_P]

    part_P = start_P * copies_P // total_P
    parts_P = (start_P + size_P - 1) * copies_P // total_P - part_P + 1
    pair_N = np.repeat(np.arange(len(met_P)), parts_P)
    part_N = part_P[pair_N] + np.arange(len(pair_N)) - (np.cumsum(parts_P) - parts_P)[pair_N]

    def first_row(part_N: Int64) -> Int64:
        """Of the rows that begin at or after the part's first element."""
        border_N = -(-total_P[pair_N] * part_N // copies_P[pair_N])
        row_N: Int64 = -((start_P[pair_N] - border_N) // met_P["columns"][pair_N])
        return np.clip(row_N, 0, met_P["rows"][pair_N])

    row_N = first_row(part_N)
    rows_N = first_row(part_N + 1) - row_N
    some = rows_N > 0
    return pair_N[some], part_N[some], row_N[some], rows_N[some]


def _transfers(met_N: Boxes, source_N: Boxes, target_N: Boxes) -> Boxes:
    """Adds both sides' places and sorts, for each source, by target and place there; streams are dense."""
    transfers_N = np.empty(len(met_N), TRANSFER)
    for name in met_N.dtype.names or ():
        transfers_N[name] = met_N[name]
    for side, box_N in (("source", source_N), ("target", target_N)):
        transfers_N[side] = box_N["rank"]
        transfers_N[f"{side}_buffer"] = box_N["buffer"]
        transfers_N[f"{side}_stride"] = box_N["stride"]
        skipped_N = (met_N["row"] - box_N["row"]) * box_N["stride"] + met_N["column"] - box_N["column"]
        transfers_N[f"{side}_offset"] = box_N["offset"] + skipped_N
    keys = ("target_offset", "target_buffer", "target", "source")
    transfers_N = transfers_N[np.lexsort([transfers_N[key] for key in keys])]
    size_N = transfers_N["rows"] * transfers_N["columns"]
    start_N = np.cumsum(size_N) - size_N
    first_of_source_N = np.searchsorted(transfers_N["source"], transfers_N["source"])
    transfers_N["stream"] = start_N - start_N[first_of_source_N]
    return transfers_N
