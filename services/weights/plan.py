"""Plans a push: which trainer rank sends which box of which tensor to which replica rank, and when. Pure.

Worked example: trainer rank 0 holds rows 0-1 of `w` [4, 6] and rank 1 rows 2-3 (TP2), with data-parallel
copies on ranks 2 and 3; the replica (TP1) needs all of it. Ranks 0 and 2 hold the same two rows, so 0 sends
row 0 and 2 sends row 1; likewise 1 and 3: four transfers of one row. The replica receives from one rank at a
time: four rounds. Replicas with TP2, which split `w` by rows like the trainer, would need two: in each, rank
0 or 2 sends to their rank 0, and rank 1 or 3 to their rank 1.

Letters in shapes: H boxes that the sources hold, W boxes that the targets want, D distinct boxes of H, N
pieces (initially intersections of distinct and wanted boxes, finally transfers), B stretches of a line, K
pairs of a source and a target, P parts.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.weights.rounds import rounds
from atoll.weights.senders import assign_senders
from atoll.wire.types import BOX, TRANSFER, Int64, Plan, ShardLayout

Boxes = NDArray[np.void]
MAX_SENDERS = 8
AXES = (("row", "rows"), ("column", "columns"))
PLACE = ("tensor", "row", "column", "rows", "columns")
OWNED = np.dtype([("owner", np.int32), *BOX.descr])  # index of a source shard layout, or a target rank
PIECE = np.dtype(
    [
        ("held", np.int32),  # index of the distinct box
        ("wanted", np.int32),
        ("source", np.int32),  # rank
        ("target", np.int32),
        ("row", np.int64),
        ("rows", np.int64),
        ("column", np.int64),
        ("columns", np.int64),
    ]
)


def plan(
    sources: Sequence[ShardLayout],
    targets: Sequence[ShardLayout],
    *,
    part_elements: int,
    max_senders: int = MAX_SENDERS,
    tie_break: int = 0,
) -> Plan:
    """Plans transfers from the trainer's ranks to the tensor-parallel ranks of one class of replicas.

    `sources` and `targets` are indexed by rank; ranks with equal shard layouts (data-parallel copies) are
    planned as one. `tie_break` numbers the trainer's classes of replicas, so that their plans use different
    copies if there are any.

    Guarantees:
    - Every element that a target needs arrives exactly once, from a rank that holds it.
    - A part (what one source sends to one target in one round) has at most `part_elements` elements. Parts
      are cut between rows, or within rows longer than an eighth of a part.
    - In each round a source sends at most one part and a target receives at most one; there are as many
      rounds as the busiest rank has parts.
    - A target receives from at most `max_senders` ranks, or more if it needs them as the only holders of
      something. Within that limit as many copies as possible send; with several targets, to different ones.
    - Ranks that hold the same boxes and send any of them send equal amounts, to within 5 % or one row.
      Exception: boxes held by ranks with different shard layouts, if the limit on senders rules that out.
    - Equal arguments give equal plans with equal ids.

    The sources' boxes of a tensor must be equal or disjoint. Raises ValueError naming a tensor for which they
    are not, or which one side lacks, has only in part, or has with a different shape.
    """
    tensors = tuple(dict.fromkeys(chain.from_iterable(dict.fromkeys(c.tensors for c in targets))))
    shard_layouts, copies = _classes(sources)
    for name in sorted(set(chain.from_iterable({c.tensors for c in shard_layouts})).difference(tensors))[:1]:
        raise ValueError(f"the trainer holds {name!r}, which no replica keeps: both must load the same model")
    held_H, wanted_W = _list_owned(shard_layouts, tensors), _list_owned(targets, tensors)
    _check_shapes(held_H, wanted_W, tensors)
    held_H, first_D = _by_place(held_H)
    _check_disjoint(held_H[first_D], tensors)
    pieces_N = _intersect(held_H[first_D], wanted_W)
    _check_covered(pieces_N, wanted_W, tensors)

    sets, set_D = _sets(held_H["owner"], first_D)
    pieces_N = _share_among_senders(pieces_N, set_D, sets, copies, max_senders, tie_break)
    pieces_N, round_N = _in_rounds(pieces_N, part_elements)
    owner_R = np.zeros(len(sources), np.int64)
    for owner, ranks in enumerate(copies):
        owner_R[ranks] = owner
    source_N = _find(held_H["owner"], first_D, pieces_N["held"], owner_R[pieces_N["source"]])
    transfers_N = _transfers(pieces_N, round_N, held_H, source_N, wanted_W)
    digest = xxhash.xxh3_128(transfers_N.tobytes())
    digest.update("\0".join(tensors).encode())
    return Plan(digest.hexdigest(), tensors, transfers_N)


def _classes(sources: Sequence[ShardLayout]) -> tuple[list[ShardLayout], list[list[int]]]:
    """The distinct shard layouts, and the ranks with each."""
    digests = {id(c): xxhash.xxh3_128_digest(c.boxes.tobytes()) for c in {id(c): c for c in sources}.values()}
    ranks: dict[tuple[tuple[str, ...], bytes], list[int]] = {}
    for rank, shard_layout in enumerate(sources):
        ranks.setdefault((shard_layout.tensors, digests[id(shard_layout)]), []).append(rank)
    return [sources[same[0]] for same in ranks.values()], list(ranks.values())


def _list_owned(shard_layouts: Sequence[ShardLayout], tensors: tuple[str, ...]) -> Boxes:
    """The boxes of all shard layouts with their owners; tensors are numbered as in `tensors`."""
    number = {name: i for i, name in enumerate(tensors)}
    numbers = {
        names: np.array([number[name] for name in names], np.int32)
        for names in {c.tensors for c in shard_layouts}
    }
    ends = np.cumsum([len(shard_layout.boxes) for shard_layout in shard_layouts]).tolist()
    owned = np.empty(ends[-1], OWNED)
    for owner, (begin, end, shard_layout) in enumerate(zip([0, *ends], ends, shard_layouts, strict=False)):
        part = owned[begin:end]
        part["owner"] = owner
        for name in BOX.names or ():
            part[name] = shard_layout.boxes[name]
        part["tensor"] = numbers[shard_layout.tensors][part["tensor"]]
    return owned


def _by_place(held_H: Boxes) -> tuple[Boxes, Int64]:
    """Non-empty boxes sorted by position and owner, once per owner; and the index of each distinct box's
    first one [D]."""
    order = np.lexsort([held_H[key] for key in ("owner", *reversed(PLACE))])
    order = order[(held_H["rows"] * held_H["columns"])[order] > 0]
    new_H = np.ones(len(order), bool)
    new_H[1:] = np.any([np.diff(held_H[key][order]) != 0 for key in PLACE], axis=0)
    keep_H = new_H.copy()
    keep_H[1:] |= np.diff(held_H["owner"][order]) != 0
    return held_H[order[keep_H]], np.flatnonzero(new_H[keep_H])


def _intersect(distinct_D: Boxes, wanted_W: Boxes) -> Boxes:
    """[N] pieces: the intersections of held and wanted boxes."""
    d_begin, d_end, w_begin, w_end = _intervals(distinct_D, wanted_W)
    order_W = np.argsort(w_begin, kind="stable")
    # the range of wanted boxes, in order, that may intersect each held one
    first_D = np.searchsorted(np.maximum.accumulate(w_end[order_W]), d_begin, "right")
    d, w = _expand(first_D, np.searchsorted(w_begin[order_W], d_end))
    return _overlap(distinct_D, wanted_W, d, order_W[w])


def _intervals(*sides: Boxes) -> list[Int64]:
    """Begin and end of each side's boxes on a line of all tensors, along the axis cut by the first side."""
    most = max(int((side[at] + side[size]).max(initial=0)) for side in sides for at, size in AXES)
    num_tensors = max(int(side["tensor"].max(initial=-1)) for side in sides) + 1
    by_columns = np.ones(num_tensors, bool)
    by_columns[sides[0]["tensor"][sides[0]["row"] > 0]] = False
    found = []
    for side in sides:
        across = by_columns[side["tensor"]]
        begin = np.where(across, side["column"], side["row"]) + side["tensor"] * np.int64(most)
        found += [begin, begin + np.where(across, side["columns"], side["rows"])]
    return found


def _expand(first: Int64, end: Int64) -> tuple[Int64, Int64]:
    """All (i, j) with first[i] <= j < end[i]."""
    count = np.maximum(end - first, 0)
    i = np.repeat(np.arange(len(first)), count)
    return i, np.arange(len(i)) - (np.cumsum(count) - count - first)[i]


def _overlap(held: Boxes, wanted: Boxes, i: Int64, j: Int64) -> Boxes:
    """The non-empty intersections of boxes i of the one side and j of the other."""
    some, spans = np.ones(len(i), bool), {}
    for at, size in AXES:
        spans[at] = np.maximum(held[at][i], wanted[at][j])
        spans[size] = np.minimum((held[at] + held[size])[i], (wanted[at] + wanted[size])[j]) - spans[at]
        some &= spans[size] > 0
    pieces = np.zeros(np.count_nonzero(some), PIECE)
    pieces["held"], pieces["wanted"], pieces["target"] = i[some], j[some], wanted["owner"][j[some]]
    for name, values in spans.items():
        pieces[name] = values[some]
    return pieces


def _check_shapes(held_H: Boxes, wanted_W: Boxes, tensors: tuple[str, ...]) -> None:
    shapes = np.zeros((2, len(tensors), 2), np.int64)
    for side, boxes in enumerate((held_H, wanted_W)):
        for axis, (at, size) in enumerate(AXES):
            np.maximum.at(shapes[side, :, axis], boxes["tensor"], boxes[at] + boxes[size])
    for t in np.flatnonzero((shapes[0] != shapes[1]).any(axis=-1))[:1]:
        if not shapes[0, t].any():
            raise ValueError(f"the trainer does not hold {tensors[t]!r}, which the replicas keep")
        raise ValueError(
            f"{tensors[t]!r} is {shapes[0, t].tolist()} in the trainer and {shapes[1, t].tolist()} in the "
            "replicas: both must load the same model"
        )


def _check_disjoint(distinct_D: Boxes, tensors: tuple[str, ...]) -> None:
    begin, end = _intervals(distinct_D)  # begins are ascending, since the boxes are sorted
    i, j = _expand(np.arange(1, len(begin) + 1), np.searchsorted(begin, end))
    for d in _overlap(distinct_D, distinct_D, i, j)["held"][:1]:
        name = tensors[distinct_D["tensor"][d]]
        raise ValueError(f"trainer ranks hold boxes of {name!r} that overlap without being equal")


def _check_covered(pieces_N: Boxes, wanted_W: Boxes, tensors: tuple[str, ...]) -> None:
    """Held boxes are disjoint, so equal areas mean that each element occurs once."""
    missing_W = wanted_W["rows"] * wanted_W["columns"]
    np.subtract.at(missing_W, pieces_N["wanted"], _size(pieces_N))
    for w in np.flatnonzero(missing_W)[:1]:
        raise ValueError(
            f"{missing_W[w]} elements of {tensors[wanted_W['tensor'][w]]!r} that the replicas keep are on no "
            "trainer rank"
        )


def _size(pieces: Boxes) -> Int64:
    size: Int64 = pieces["rows"] * pieces["columns"]
    return size


def _sets(owner_H: NDArray[np.int32], first_D: Int64) -> tuple[list[tuple[int, ...]], Int64]:
    """The distinct sets of owners, small ones first, and the index of each box's set [D]."""
    sets: list[tuple[int, ...]] = []
    set_D = np.empty(len(first_D), np.int64)
    count_D = np.diff(first_D, append=len(owner_H))
    for count in np.unique(count_D).tolist():
        of_count = np.flatnonzero(count_D == count)
        number = np.zeros(len(of_count), np.int64)
        for i in range(count):  # indices of the sets of the first i + 1 owners
            number = number * (int(owner_H.max()) + 1) + owner_H[first_D[of_count] + i]
            _, example, number = np.unique(number, return_index=True, return_inverse=True)
        set_D[of_count] = len(sets) + number
        sets += [tuple(owner_H[first : first + count].tolist()) for first in first_D[of_count[example]]]
    return sets, set_D


def _share_among_senders(
    pieces_N: Boxes,
    set_D: Int64,
    sets: Sequence[Sequence[int]],
    copies: Sequence[Sequence[int]],
    max_senders: int,
    tie_break: int,
) -> Boxes:
    """Divides the pieces by rows among the sending ranks, and sets their sources."""
    set_N = set_D[pieces_N["held"]]
    num_targets = int(pieces_N["target"].max()) + 1
    key_N = set_N * num_targets + pieces_N["target"]
    wanted_ST = np.bincount(key_N, _size(pieces_N), len(sets) * num_targets).astype(np.int64)  # below 2**53
    begin_B, sender_B = assign_senders(
        wanted_ST.reshape(-1, num_targets), sets, copies, max_senders, tie_break
    )
    pieces_N, stretch_N = _cut(pieces_N[np.lexsort((pieces_N["wanted"], key_N))], begin_B)
    pieces_N["source"] = sender_B[stretch_N]
    return pieces_N


def _cut(line_N: Boxes, begin_B: Int64) -> tuple[Boxes, Int64]:
    """Cuts consecutive pieces on a line of elements at the row borders nearest to the beginnings of the
    stretches. Returns the pieces, and the stretch of each."""
    end_N = np.cumsum(_size(line_N))
    begin_N = end_N - _size(line_N)
    border_B = np.append(begin_B, end_N[-1])
    n, stretch = _expand(np.searchsorted(begin_B, begin_N, "right") - 1, np.searchsorted(begin_B, end_N))
    begin, rows, width = begin_N[n], line_N["rows"][n], line_N["columns"][n]

    def row(border: Int64) -> Int64:
        """The first row of which at least half lies beyond the border."""
        row: Int64 = -((2 * (begin - border) + width) // (2 * width))
        return np.clip(row, 0, rows)

    first, end = row(border_B[stretch]), row(border_B[stretch + 1])
    some = end > first
    pieces = line_N[n[some]]
    pieces["row"] += first[some]
    pieces["rows"] = (end - first)[some]
    return pieces, stretch[some]


def _in_rounds(pieces_N: Boxes, part_elements: int) -> tuple[Boxes, Int64]:
    """Cuts the pieces of each source and target into parts. Returns the pieces sorted by source and round,
    and the round of each."""
    pieces_N = _narrow(pieces_N, max(1, part_elements // 8))
    num_targets = int(pieces_N["target"].max()) + 1
    key_N = pieces_N["source"] * np.int64(num_targets) + pieces_N["target"]
    order_N = np.argsort(key_N, kind="stable")
    pieces_N, key_N = pieces_N[order_N], key_N[order_N]
    first_K = np.flatnonzero(np.diff(key_N, prepend=-1))
    size_K = np.add.reduceat(_size(pieces_N), first_K)
    # a part exceeds its equal share of what its source sends to its target by less than a row
    parts_K = -(-size_K // (part_elements + 1 - int(pieces_N["columns"].max())))
    k, number = _expand(np.zeros_like(parts_K), parts_K)
    pieces_N, part_N = _cut(pieces_N, (np.cumsum(size_K) - size_K)[k] + -(-size_K[k] * number // parts_K[k]))
    first_P = np.flatnonzero(np.diff(part_N, prepend=-1))
    round_P = rounds(pieces_N["source"][first_P].tolist(), pieces_N["target"][first_P].tolist())
    round_N = np.repeat(round_P, np.diff(first_P, append=len(part_N)))
    order_N = np.lexsort((round_N, pieces_N["source"]))
    return pieces_N[order_N], round_N[order_N]


def _narrow(pieces_N: Boxes, most: int) -> Boxes:
    """Cuts pieces of more than `most` columns into narrower ones."""
    cuts_N = -(-pieces_N["columns"] // most)
    n, number = _expand(np.zeros_like(cuts_N), cuts_N)
    narrow = pieces_N[n]
    begin, end = (narrow["columns"] * i // cuts_N[n] for i in (number, number + 1))
    narrow["column"] += begin
    narrow["columns"] = end - begin
    return narrow


def _find(owner_H: NDArray[np.int32], first_D: Int64, d_N: Int64, owner_N: Int64) -> Int64:
    """[N] index of the owner's copy of each distinct box among the held boxes."""
    d_H = np.repeat(np.arange(len(first_D)), np.diff(first_D, append=len(owner_H)))
    num_owners = int(owner_H.max()) + 1
    return np.searchsorted(d_H * num_owners + owner_H, d_N * num_owners + owner_N)


def _transfers(pieces_N: Boxes, round_N: Int64, held_H: Boxes, source_N: Int64, wanted_W: Boxes) -> Boxes:
    """Adds both sides' positions in memory; streams are dense."""
    transfers_N = np.empty(len(pieces_N), TRANSFER)
    for name in ("source", "target", "row", "rows", "column", "columns"):
        transfers_N[name] = pieces_N[name]
    for side, boxes, i in (("source", held_H, source_N), ("target", wanted_W, pieces_N["wanted"])):
        row, column, stride = (boxes[name][i] for name in ("row", "column", "stride"))
        transfers_N[f"{side}_buffer"] = boxes["buffer"][i]
        transfers_N[f"{side}_stride"] = stride
        skipped_N = (pieces_N["row"] - row) * stride + pieces_N["column"] - column
        transfers_N[f"{side}_offset"] = boxes["offset"][i] + skipped_N
    transfers_N["tensor"] = wanted_W["tensor"][pieces_N["wanted"]]
    transfers_N["round"] = round_N
    end_N = np.cumsum(_size(pieces_N))
    begin_N = end_N - _size(pieces_N)
    transfers_N["stream"] = begin_N - begin_N[np.searchsorted(pieces_N["source"], pieces_N["source"])]
    return transfers_N
