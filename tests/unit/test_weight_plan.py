"""The plan against brute force: follows every element's path on random layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.megatron import names
from atoll.trainer.megatron.names import Chunk
from atoll.weights.estimate import estimate
from atoll.weights.plan import plan as weight_plan
from atoll.weights.rounds import rounds
from atoll.wire.types import BOX, Plan, ShardLayout
from tests.unit.test_trainer_names import MOE, SPEC

Shapes = Sequence[tuple[int, int]]
plan = partial(weight_plan, part_elements=1 << 20)


def sharded(
    shapes: Shapes, ranks: int, axes: Sequence[int | None], names: Sequence[str] = ()
) -> list[ShardLayout]:
    """Tensor t split over `ranks` along axes[t] (None: whole on every rank), one dense buffer per rank."""
    shard_layouts = []
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
        shard_layouts.append(
            ShardLayout(tuple(names or (f"t{t}" for t in range(len(shapes)))), np.array(boxes, BOX))
        )
    return shard_layouts


def columns_of(transfers: np.ndarray, *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(transfers[name].tolist() for name in names), strict=True)


def check_every_element(
    shapes: Shapes, sources: Sequence[ShardLayout], targets: Sequence[ShardLayout], result: Plan
) -> None:
    """Numbers the elements, moves the numbers by the plan, and checks where they arrive."""
    numbers = [np.arange(r * c).reshape(r, c) + 1_000_000 * (t + 1) for t, (r, c) in enumerate(shapes)]

    def places(offset: int, rows: int, stride: int, columns: int) -> np.ndarray:
        return offset + np.arange(rows)[:, None] * stride + np.arange(columns)

    def memory(shard_layout: ShardLayout, fill: bool) -> np.ndarray:
        buffer = np.full(10_000, -1)
        for t, row, rows, column, columns, _, offset, stride in shard_layout.boxes.tolist():
            whole = numbers[int(shard_layout.tensors[t].removeprefix("t"))]
            box = whole[row : row + rows, column : column + columns]
            buffer[places(offset, rows, stride, columns)] = box if fill else 0
        return buffer

    source_memory = [memory(shard_layout, True) for shard_layout in sources]
    target_memory = [memory(shard_layout, False) for shard_layout in targets]
    next_in_stream = [0] * len(sources)
    ends = [f"{side}{what}" for side in ("source", "target") for what in ("", "_offset", "_stride")]
    for t, row, rows, column, columns, stream, *both in columns_of(
        result.transfers, "tensor", "row", "rows", "column", "columns", "stream", *ends
    ):
        source, source_offset, source_stride, target, target_offset, target_stride = both
        assert stream == next_in_stream[source]  # dense and in order
        next_in_stream[source] += rows * columns
        moved = source_memory[source][places(source_offset, rows, source_stride, columns)]
        place = places(target_offset, rows, target_stride, columns)
        assert not target_memory[target][place].any()  # not written before, and owned by the target
        target_memory[target][place] = moved
        whole = numbers[int(result.tensors[t][1:])]
        assert (moved == whole[row : row + rows, column : column + columns]).all()
    for shard_layout, arrived in zip(targets, target_memory, strict=True):
        np.testing.assert_array_equal(arrived, memory(shard_layout, True))


def sent(result: Plan, num_sources: int) -> np.ndarray:
    t = result.transfers
    return np.bincount(t["source"], t["rows"] * t["columns"], minlength=num_sources)


def held_by(spec: ModelSpec, chunks: Sequence[Chunk]) -> list[ShardLayout]:
    """One shard layout per rank, with all parameters in one buffer, in order; the model's tensor i is
    t{i}."""
    number = {name: i for i, name in enumerate(names.shapes(spec))}
    shard_layouts = []
    for chunk in chunks:
        tensors, boxes, offset = [], [], 0
        for piece in (piece for held in names.tensor_slices(spec, chunk).values() for piece in held):
            place = (piece.row, piece.rows, piece.column, piece.columns)
            boxes.append((len(boxes), *place, 0, offset, piece.columns))
            tensors.append(f"t{number[piece.tensor]}")
            offset += piece.rows * piece.columns
        shard_layouts.append(ShardLayout(tuple(tensors), np.array(boxes, BOX)))
    return shard_layouts


TIED = replace(SPEC, tied=True)
WHOLE = names.whole_model(SPEC)
STAGES = (replace(WHOLE, layers=range(2), is_last=False), replace(WHOLE, layers=range(2, 3), is_first=False))
TRAINERS = {
    "pp2": (SPEC, STAGES),
    "pp2 tied": (TIED, STAGES),
    "tp2 x pp2 tied": (TIED, [replace(stage, rank=r, size=2) for stage in STAGES for r in range(2)]),
    "pp2 x dp2": (SPEC, [stage for stage in STAGES for _ in range(2)]),
    "ep2": (MOE, [replace(WHOLE, experts=experts) for experts in (range(2), range(2, 4))]),
    "pp2 x ep2": (
        MOE,
        [replace(stage, experts=experts) for stage in STAGES for experts in (range(2), range(2, 4))],
    ),
    "tp2 of experts": (MOE, [replace(WHOLE, rank=r, size=2, experts=range(4)) for r in range(2)]),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_stages_and_experts_send_each_element_once(trainer: str) -> None:
    """Ranks that hold the same tensors (norms, the tied embedding on the first and the last stage, everything
    but the experts of expert ranks) share the work: each sends its part, to within a row per set of ranks."""
    spec, chunks = TRAINERS[trainer]
    sources, targets = held_by(spec, chunks), held_by(spec, [names.whole_model(spec)])
    result = plan(sources, targets)
    shapes = [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in names.shapes(spec).values()]
    check_every_element(shapes, sources, targets, result)

    holders: dict[tuple[object, ...], set[int]] = {}
    for rank, shard_layout in enumerate(sources):
        for tensor, *place in shard_layout.boxes.tolist():
            holders.setdefault((shard_layout.tensors[tensor], *place[:4]), set()).add(rank)
    fair = np.zeros(len(sources))
    for (_, _, rows, _, columns), ranks in holders.items():
        fair[list(ranks)] += rows * columns / len(ranks)
    widest = max(columns for _, columns in shapes)
    num_sets = len(set(map(frozenset, holders.values())))
    assert (np.abs(sent(result, len(sources)) - fair) <= widest * num_sets).all()


def test_a_tied_embedding_is_sent_by_both_of_its_stages() -> None:
    """24 rows of 6: the first stage sends 12 of them, the last one the others."""
    sources, targets = held_by(TIED, STAGES), held_by(TIED, [names.whole_model(TIED)])
    result = plan(sources, targets)
    of_embedding = result.transfers[result.transfers["tensor"] == result.tensors.index("t0")]
    assert of_embedding[["source", "row", "rows"]].tolist() == [(0, 0, 12), (1, 12, 12)]


def test_worked_example():
    """The example of the module's docstring."""
    sources = sharded([(4, 6)], 2, [0]) * 2
    t = plan(sources, sharded([(4, 6)], 1, [None])).transfers
    columns = ["source", "row", "rows", "source_offset", "target_offset", "stream", "round"]
    assert t[columns].tolist() == [
        (0, 0, 1, 0, 0, 0, 0),
        (1, 2, 1, 0, 12, 0, 1),
        (2, 1, 1, 6, 6, 0, 2),
        (3, 3, 1, 6, 18, 0, 3),
    ]
    t = plan(sources, sharded([(4, 6)], 2, [0])).transfers
    assert t[["source", "target", "row", "rows", "target_offset", "round"]].tolist() == [
        (0, 0, 0, 1, 0, 0),
        (1, 1, 2, 1, 0, 0),
        (2, 0, 1, 1, 6, 1),
        (3, 1, 3, 1, 6, 1),
    ]


def served(result: Plan) -> list[tuple[int, int]]:
    return sorted(set(columns_of(result.transfers, "source", "target")))


def test_copies_serve_different_targets():
    """A vocabulary that is not divisible by 8: targets get 63 or 64 rows of 505, and still one copy each."""
    shapes = [(505, 4)]
    sources, targets = sharded(shapes, 1, [None]) * 8, sharded(shapes, 8, [0])
    assert served(plan(sources, targets)) == [(rank, rank) for rank in range(8)]
    # each class of replicas uses the next two of four copies, since one sender per target is enough
    sources, targets = sharded(shapes, 1, [None]) * 4, sharded(shapes, 2, [0])
    by_tie_break = [
        served(plan(sources, targets, max_senders=1, tie_break=tie_break)) for tie_break in range(3)
    ]
    assert by_tie_break == [[(0, 0), (1, 1)], [(2, 0), (3, 1)], [(0, 0), (1, 1)]]


def test_the_cap_leaves_copies_out():
    """TP2 x PP4 x DP4, a matrix and a norm per stage: a target needs one rank of each stage, so with at most
    8 senders it receives from two copies of each; norms, which both tensor-parallel ranks hold, also come
    from these."""
    stages = [sharded([(16, 8), (8, 1)], 2, [0, None], [f"w{p}", f"norm{p}"]) for p in range(4)]
    sources = [shard_layout for stage in stages for shard_layout in stage] * 4
    targets = sharded(
        [(16, 8), (8, 1)] * 4, 2, [0, None] * 4, [f"{n}{p}" for p in range(4) for n in ("w", "norm")]
    )
    assert served(plan(sources, targets)) == sorted(
        (8 * copy + 2 * p + rank, rank) for p in range(4) for rank in range(2) for copy in range(2)
    )
    assert sent(plan(sources, targets), 32)[:16].tolist() == [8 * 8 / 2 + 8 / 2] * 16


def test_a_part_is_at_most_that_large():
    """8 rows of 100 elements in parts of at most 250: rows longer than 31 are cut, here into four pieces of
    25, so parts are sized for 226 elements and up to one piece more: 800 elements become four parts of 200.
    """
    shapes = [(8, 100)]
    result = plan(sharded(shapes, 1, [0]), sharded(shapes, 1, [0]), part_elements=250)
    size = np.bincount(result.transfers["round"], result.transfers["rows"] * result.transfers["columns"])
    assert size.tolist() == [200] * 4


def test_many_small_tensors_are_shared_too():
    """One-row tensors cannot be cut: different senders send whole ones."""
    shapes = [(1, 8)] * 40
    result = plan(sharded(shapes, 1, [None] * 40) * 4, sharded(shapes, 1, [None] * 40))
    assert sent(result, 4).tolist() == [80, 80, 80, 80]


def test_interleaved_and_strided_places():
    """A fused qkv in Megatron's layout (per group: two q heads, k, v; head size 1) to separate tensors."""
    source = ShardLayout(
        ("t0", "t1", "t2"),
        np.array(
            [(t, row, rows, 0, 3, 0, 3 * at, 3) for t, row, rows, at in
             [(0, 0, 2, 0), (1, 0, 1, 2), (2, 0, 1, 3), (0, 2, 2, 4), (1, 1, 1, 6), (2, 1, 1, 7)]],
            BOX,
        ),
    )  # fmt: skip
    shapes = [(4, 3), (2, 3), (2, 3)]
    targets = [
        ShardLayout(("t2", "t0", "t1"), np.array([(0, 0, 2, 0, 3, 0, 100, 7), (1, 0, 4, 0, 3, 0, 200, 3),
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


def test_no_fewer_rounds_than_the_busiest_rank_has_parts():
    """Random parts of 30 sources and 8 targets, many of them between the same two."""
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(30, size=2000) ** 2 // 30, rng.integers(8, size=2000)
    number = rounds(sources.tolist(), targets.tolist())
    assert number.max() + 1 == max(np.bincount(sources).max(), np.bincount(targets).max())
    for side in (sources, targets):
        assert len(set(zip(side.tolist(), number.tolist(), strict=True))) == 2000


def test_estimate():
    """The worked example in bfloat16 at 100 bytes a second: a row is 12 bytes. Four rounds of one row to TP1,
    two rounds to TP2."""
    sources = sharded([(4, 6)], 2, [0]) * 2
    whole = estimate(plan(sources, sharded([(4, 6)], 1, [None])), itemsize=2, bytes_per_s=100)
    assert (whole.source_bytes.tolist(), whole.target_bytes.tolist()) == ([12] * 4, [48])
    assert (whole.rounds, whole.seconds) == (4, pytest.approx(4 * 12 / 100))
    halves = estimate(plan(sources, sharded([(4, 6)], 2, [0])), itemsize=2, bytes_per_s=100)
    assert (halves.rounds, halves.seconds) == (2, pytest.approx(2 * 12 / 100))
    assert halves.target_bytes.tolist() == [24, 24]
