"""The plan's guarantees, on random layouts."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.weights.plan import plan
from atoll.wire.types import BOX, Plan, ShardLayout
from tests.unit.test_weight_plan import Shapes, check_every_element, columns_of

T = TypeVar("T")
Ranks = frozenset[int]


@dataclass(frozen=True)
class Layout:
    """A trainer with PP x EP x TP x DP, and replicas with another TP."""

    shapes: Shapes
    held: Sequence[str]  # how the trainer's ranks store each tensor
    stages: Sequence[int]  # of each tensor; a tied one is on the last stage, too
    experts: Sequence[int]  # expert-parallel rank, of experts
    wanted: Sequence[str]  # how the replicas' ranks store it
    gaps: Sequence[int]  # unused elements after each row and each tensor
    sizes: tuple[int, int, int, int]
    target_tp: int

    def sources(self) -> list[ShardLayout]:
        pipeline, expert, tensor, data = self.sizes
        stages = {t: {stage, pipeline - 1} if self.held[t] == "tied" else {stage}
                  for t, stage in enumerate(self.stages)}  # fmt: skip
        shard_layouts = [
            self._shard_layout(
                [t for t in stages if p in stages[t] and (self.held[t] != "expert" or e == self.experts[t])],
                ["rows" if held == "tied" else held for held in self.held],
                rank,
                tensor,
            )
            for p in range(pipeline)
            for e in range(expert)
            for rank in range(tensor)
        ]
        return [shard_layout for shard_layout in shard_layouts if len(shard_layout.boxes)] * data

    def targets(self) -> list[ShardLayout]:
        everything = range(len(self.shapes))
        return [
            self._shard_layout(everything, self.wanted, rank, self.target_tp)
            for rank in range(self.target_tp)
        ]

    def _shard_layout(
        self, tensors: Sequence[int], kept: Sequence[str], rank: int, ranks: int
    ) -> ShardLayout:
        boxes, offset = [], 0
        for number, t in enumerate(tensors):
            (rows, columns), row, column = self.shapes[t], 0, 0
            if kept[t] == "rows":
                row, rows = np.diff([rows * r // ranks for r in (0, rank, rank + 1)]).tolist()
            elif kept[t] == "columns":
                column, columns = np.diff([columns * r // ranks for r in (0, rank, rank + 1)]).tolist()
            boxes.append((number, row, rows, column, columns, 0, offset, columns + self.gaps[t]))
            offset += (rows + 1) * (columns + self.gaps[t])
        return ShardLayout(tuple(f"t{t}" for t in tensors), np.array(boxes, BOX))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
    count = draw(st.integers(1, 5))

    def each(choices: st.SearchStrategy[T]) -> list[T]:
        return draw(st.lists(choices, min_size=count, max_size=count))

    held = each(st.sampled_from(["rows", "columns", "whole", "expert", "tied"]))
    stages = each(st.integers(0, sizes[0] - 1))
    return Layout(
        shapes=each(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 5, 8, 40]))),
        held=held,
        stages=[0 if kept == "tied" else stage for kept, stage in zip(held, stages, strict=True)],
        experts=each(st.integers(0, sizes[1] - 1)),
        wanted=each(st.sampled_from(["rows", "columns", "whole"])),
        gaps=each(st.integers(0, 2)),
        sizes=sizes,
        target_tp=draw(st.integers(1, 4)),
    )


def holders(sources: Sequence[ShardLayout]) -> dict[tuple[object, ...], Ranks]:
    """The ranks that hold each box: tensor, row, rows, column, columns."""
    found: dict[tuple[object, ...], set[int]] = {}
    for rank, shard_layout in enumerate(sources):
        for tensor, *place in shard_layout.boxes.tolist():
            if place[1] and place[3]:
                found.setdefault((shard_layout.tensors[tensor], *place[:4]), set()).add(rank)
    return {box: frozenset(ranks) for box, ranks in found.items()}


def sets_of(result: Plan, sources: Sequence[ShardLayout]) -> list[Ranks]:
    """For each transfer, the ranks that could have made it."""
    boxes = holders(sources)
    return [
        next(
            ranks
            for (tensor, first_row, rows, first_column, columns), ranks in boxes.items()
            if tensor == result.tensors[t]
            and first_row <= row < first_row + rows
            and first_column <= column < first_column + columns
        )
        for t, row, column in columns_of(result.transfers, "tensor", "row", "column")
    ]


def needed(sets: Collection[Ranks], sources: Sequence[ShardLayout]) -> int:
    """How many shard layouts must send if each of these sets sends something: the only holders of something,
    and one for each set without any of these."""
    content = [(shard_layout.tensors, shard_layout.boxes.tobytes()) for shard_layout in sources]
    shard_layouts = {frozenset(content[rank] for rank in ranks) for ranks in sets}
    alone = frozenset().union(*(some for some in shard_layouts if len(some) == 1))
    return len(alone) + sum(not some & alone for some in shard_layouts)


@settings(max_examples=80, deadline=None)
@given(layouts(), st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
def test_what_holds_of_every_plan(layout: Layout, part_elements: int, cap: int, tie_break: int) -> None:
    sources, targets = layout.sources(), layout.targets()
    result = plan(sources, targets, part_elements=part_elements, max_senders=cap, tie_break=tie_break)
    check_every_element(layout.shapes, sources, targets, result)
    t = result.transfers
    again = plan(
        layout.sources(), layout.targets(), part_elements=part_elements, max_senders=cap, tie_break=tie_break
    )
    assert (again.id, again.transfers.tobytes()) == (result.id, t.tobytes())

    # parts fit, no rank is in two parts of a round, and a rank with a part in every round needs all rounds
    parts: Counter[tuple[int, int, int]] = Counter()
    for source, target, number, rows, columns in columns_of(
        t, "source", "target", "round", "rows", "columns"
    ):
        parts[source, target, number] += rows * columns
    assert max(parts.values()) <= part_elements
    for end in (0, 1):
        assert max(Counter((part[end], part[2]) for part in parts).values()) == 1
    busiest = max(max(Counter(part[end] for part in parts).values()) for end in (0, 1))
    assert {number for _, _, number in parts} == set(range(busiest))

    sets = sets_of(result, sources)
    for target in range(layout.target_tp):
        mine = np.flatnonzero(t["target"] == target)
        senders = np.unique(t["source"][mine])
        assert len(senders) <= max(cap, needed({sets[i] for i in mine}, sources))


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_those_that_hold_the_same_send_the_same(layout: Layout) -> None:
    """Without a limit on senders: to within 5 % or one row. All send, except in sets with fewer rows than
    ranks."""
    sources = layout.sources()
    result = plan(sources, layout.targets(), part_elements=1 << 20, max_senders=len(sources))
    sent_by: dict[Ranks, Counter[int]] = {}
    moves = columns_of(result.transfers, "source", "rows", "columns")
    for ranks, (source, rows, columns) in zip(sets_of(result, sources), moves, strict=True):
        sent_by.setdefault(ranks, Counter())[source] += rows * columns
    for ranks, sent_of in sent_by.items():
        widest = max(box[4] for box, held in holders(sources).items() if held == ranks)
        fair = sum(sent_of.values()) / len(sent_of)
        assert max(abs(elements - fair) for elements in sent_of.values()) <= max(0.05 * fair, widest)
        if sum(sent_of.values()) >= len(ranks) * widest:
            assert sent_of.keys() == ranks
