"""The plan against brute force: every element's path is followed on random layouts."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.plan import plan
from services.wire.types import BOX, Catalog, Plan

Shapes = Sequence[tuple[int, int]]


def sharded(
    shapes: Shapes, ranks: int, axes: Sequence[int | None], names: Sequence[str] = ()
) -> list[Catalog]:
    """Tensor t cut in `ranks` along axes[t] (None: on every rank whole), one dense buffer per rank."""
    catalogs = []
    for rank in range(ranks):
        boxes, offset = [], 0
        for t, (rows, columns) in enumerate(shapes):
            row = column = 0
            if axes[t] == 0:
                row, rows = np.diff([rows * r // ranks for r in (0, rank, rank + 1)]).tolist()
            elif axes[t] == 1:
                column, columns = np.diff([columns * r // ranks for r in (0, rank, rank + 1)]).tolist()
            boxes.append((t, row, rows, column, columns, 0, offset, columns))
            offset += rows * columns
        catalogs.append(Catalog(tuple(names or (f"t{t}" for t in range(len(shapes)))), np.array(boxes, BOX)))
    return catalogs


def check_every_element(
    shapes: Shapes, sources: Sequence[Catalog], targets: Sequence[Catalog], result: Plan
) -> None:
    """Numbers each element, moves the numbers by the plan one by one, and looks where they arrive."""
    numbers = [np.arange(r * c).reshape(r, c) + 1_000_000 * (t + 1) for t, (r, c) in enumerate(shapes)]

    def memory(catalog: Catalog, fill: bool) -> np.ndarray:
        buffer = np.full(10_000, -1)
        for box in catalog.boxes:
            t = int(catalog.tensors[box["tensor"]].removeprefix("t"))
            for i in range(box["rows"]):
                for j in range(box["columns"]):
                    number = numbers[t][box["row"] + i, box["column"] + j]
                    buffer[box["offset"] + i * box["stride"] + j] = number if fill else 0
        return buffer

    source_memory = [memory(catalog, True) for catalog in sources]
    target_memory = [memory(catalog, False) for catalog in targets]
    next_in_stream = [0] * len(sources)
    for t in result.transfers:
        assert t["stream"] == next_in_stream[t["source"]]  # dense and in order
        next_in_stream[t["source"]] += t["rows"] * t["columns"]
        for i in range(t["rows"]):
            for j in range(t["columns"]):
                moved = source_memory[t["source"]][t["source_offset"] + i * t["source_stride"] + j]
                place = t["target_offset"] + i * t["target_stride"] + j
                assert target_memory[t["target"]][place] == 0  # not written before, and the target's own
                target_memory[t["target"]][place] = moved
                name = result.tensors[t["tensor"]]
                assert moved == numbers[int(name[1:])][t["row"] + i, t["column"] + j]
    for catalog, arrived in zip(targets, target_memory, strict=True):
        np.testing.assert_array_equal(arrived, memory(catalog, True))


def sent(result: Plan, num_sources: int) -> np.ndarray:
    t = result.transfers
    return np.bincount(t["source"], t["rows"] * t["columns"], minlength=num_sources)


layouts = st.lists(
    st.tuples(
        st.integers(1, 7), st.integers(1, 7), st.sampled_from([0, 1, None]), st.sampled_from([0, 1, None])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_each_element_arrives_once(layout, source_tp, source_dp, target_tp):
    shapes = [(rows, columns) for rows, columns, _, _ in layout]
    sources = sharded(shapes, source_tp, [axis for *_, axis, _ in layout]) * source_dp
    targets = sharded(shapes, target_tp, [axis for *_, axis in layout])
    result = plan(sources, targets)
    check_every_element(shapes, sources, targets, result)

    # each rank sends, to within a row, its part of what its shard's copies share and of what all ranks share
    widest = max(columns for _, columns in shapes)
    fair = np.zeros(len(sources))
    for rank, catalog in enumerate(sources):
        for box in catalog.boxes:
            held = ["tensor", "row", "column", "columns"]  # an empty shard begins where the next one does
            holders = sum(box[held] in c.boxes[held] for c in sources)
            whole_copies = target_tp if layout[box["tensor"]][3] is None else 1
            fair[rank] += box["rows"] * box["columns"] * whole_copies / holders
    assert (np.abs(sent(result, len(sources)) - fair) < 2 * widest).all()


def test_worked_example():
    """The one of the module's docstring."""
    sources = sharded([(4, 6)], 2, [0]) * 2
    t = plan(sources, sharded([(4, 6)], 1, [None])).transfers
    assert t[["source", "row", "rows", "source_offset", "target_offset", "stream"]].tolist() == [
        (0, 0, 1, 0, 0, 0),
        (1, 2, 1, 0, 12, 0),
        (2, 1, 1, 6, 6, 0),
        (3, 3, 1, 6, 18, 0),
    ]


def test_many_small_tensors_are_shared_too():
    """One-row tensors cannot be cut: whole ones go to different senders."""
    shapes = [(1, 8)] * 40
    result = plan(sharded(shapes, 1, [None] * 40) * 4, sharded(shapes, 1, [None] * 40))
    assert sent(result, 4).tolist() == [80, 80, 80, 80]


def test_interleaved_and_strided_places():
    """A fused qkv as Megatron keeps it (per group: two q heads, k, v; head size 1) to separate tensors."""
    source = Catalog(
        ("t0", "t1", "t2"),
        np.array(
            [(t, row, rows, 0, 3, 0, 3 * at, 3) for t, row, rows, at in
             [(0, 0, 2, 0), (1, 0, 1, 2), (2, 0, 1, 3), (0, 2, 2, 4), (1, 1, 1, 6), (2, 1, 1, 7)]],
            BOX,
        ),
    )  # fmt: skip
    shapes = [(4, 3), (2, 3), (2, 3)]
    targets = [
        Catalog(("t2", "t0", "t1"), np.array([(0, 0, 2, 0, 3, 0, 100, 7), (1, 0, 4, 0, 3, 0, 200, 3),
                                              (2, 0, 2, 0, 3, 0, 300, 3)], BOX))
    ]  # fmt: skip
    check_every_element(shapes, [source], targets, plan([source], targets))


def test_id_is_of_the_content():
    two, three = sharded([(6, 2)], 2, [0]), sharded([(6, 2)], 3, [0])
    assert plan(two, three).id == plan(two, three).id
    assert plan(two, three).id != plan(three, two).id


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (sharded([(4, 4)], 1, [0]), sharded([(4, 4)] * 2, 1, [0, 0]), "does not hold 't1'"),
        (sharded([(4, 4)] * 2, 1, [0, 0]), sharded([(4, 4)], 1, [0]), "holds 't1', which no replica keeps"),
        (
            sharded([(4, 4)], 1, [0]),
            sharded([(5, 4)], 1, [0]),
            r"'t0' is \[4, 4\] in the trainer and \[5, 4\]",
        ),
        (
            sharded([(4, 4)], 2, [0]) + sharded([(4, 4)], 1, [0]),
            sharded([(4, 4)], 1, [0]),
            "'t0' that overlap",
        ),
        (
            sharded([(6, 4)], 3, [0])[::2],
            sharded([(6, 4)], 1, [0]),
            "8 elements of 't0' .* on no trainer rank",
        ),
    ],
)
def test_disagreement_names_the_tensor(sources, targets, message):
    with pytest.raises(ValueError, match=message):
        plan(sources, targets)


def test_scales():
    """TP8 x DP16 ranks with 2,000 tensors to TP8: 256,000 boxes, 1/25 of the largest fleet aimed at."""
    shapes = [(64, 64)] * 2000
    axes = [t % 2 for t in range(2000)]
    sources, targets = sharded(shapes, 8, axes) * 16, sharded(shapes, 8, axes)
    started = time.process_time()
    result = plan(sources, targets)
    assert time.process_time() - started < 5
    np.testing.assert_allclose(sent(result, 128), 2000 * 64 * 64 / 128, atol=64)
