"""Cutting batches: nothing lost, nothing split, nothing counted twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.runtime.errors import UserError
from atoll.trainer.batch import (
    check_batch,
    check_segments,
    flatten_trees,
    karmarkar_karp,
    pad,
    plan_microbatches,
    select,
    take,
)
from atoll.wire.types import Batch, PolicyBatch, Segments, SupervisedBatch, ValueBatch


def make_segments(token_ids: list[list[int]], parents: list[int], groups: list[int]) -> Segments:
    return Segments(
        token_ids=np.array([t for tokens in token_ids for t in tokens], np.int32),
        offsets=np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
        parents=np.array(parents, np.int32),
        groups=np.array(groups, np.int32),
    )


# group 0: a prompt with two samples, the first of which branches once more; group 1: one row
TREE = make_segments(
    [[5, 6], [10, 11], [12], [13, 14], [20], [30, 31, 32]],
    parents=[-1, 0, 1, 1, 0, -1],
    groups=[0, 0, 0, 0, 0, 1],
)


@st.composite
def forests(draw: st.DrawFn) -> Segments:
    parents, groups, tokens = [], [], []
    for group in range(draw(st.integers(1, 6))):
        first = len(parents)
        for i in range(draw(st.integers(1, 5))):
            parents.append(-1 if i == 0 else draw(st.integers(first, len(parents) - 1)))
            groups.append(group)
            tokens.append(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    return make_segments(tokens, parents, groups)


def everywhere(segments: Segments) -> np.ndarray:
    return np.ones(len(segments.token_ids), bool)


@given(forests(), st.integers(1, 30), st.integers(1, 3), st.booleans(), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_plan_keeps_every_tree_whole_and_within_the_budget(
    forest: Segments, max_tokens: int, num_ranks: int, alike: bool, multiple: int
) -> None:
    plan = plan_microbatches(
        forest, everywhere(forest), max_tokens, num_ranks, alike=alike, multiple=multiple
    )
    assert len(plan) == num_ranks
    assert all(len(cuts) % multiple == 0 for cuts in plan)
    if alike:
        assert len({len(cuts) for cuts in plan}) == 1
    elif multiple == 1:
        assert all(len(cut) for cuts in plan for cut in cuts)
    chosen = np.concatenate([np.zeros(0, int), *(cut for cuts in plan for cut in cuts)])
    assert sorted(chosen) == list(range(len(forest.parents)))
    lengths = np.diff(forest.offsets)
    rank_of_group: dict[int, int] = {}
    for rank, cuts in enumerate(plan):
        for cut in cuts:
            inside = set(cut.tolist())
            assert all(p in inside for p in forest.parents[cut] if p >= 0)
            num_trees = (forest.parents[cut] < 0).sum()
            assert lengths[cut].sum() <= max_tokens or num_trees == 1
            for group in forest.groups[cut].tolist():
                assert rank_of_group.setdefault(group, rank) == rank


def cuts_of(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """The plan of one rank for roots of these lengths."""
    segments = make_segments([[1] * n for n in lengths], [-1] * len(lengths), list(range(len(lengths))))
    (cuts,) = plan_microbatches(segments, everywhere(segments), max_tokens, 1)
    return sorted(cut.tolist() for cut in cuts)


def test_larger_tree_gets_its_own_microbatch() -> None:
    assert cuts_of([7, 3, 4], 7) == [[0], [1, 2]]
    assert cuts_of([7, 3, 4], 6) == [[0], [1], [2]]


def test_microbatches_of_a_rank_are_balanced() -> None:
    # 16 tokens need two of at most 12: first fit would make 12 (6, 4, 2) and 4, differencing makes 8 and 8:
    # 6 - 4 = 2, 4 - 2 = 2, then 2 - 2 = 0
    assert cuts_of([6, 4, 4, 2], 12) == [[0, 3], [1, 2]]
    # 4 - 3 = 1, 3 - 2 = 1, 1 - 1 = 0: 4 and 2 against 3 and 3
    assert cuts_of([4, 3, 3, 2], 6) == [[0, 3], [1, 2]]
    # 8, 7, 6, 5, 4 are 30, two of at most 15: differencing finds 16 and 14 (Korf 1998), first fit 15 and 15
    assert cuts_of([8, 7, 6, 5, 4], 15) == [[0, 1], [2, 3, 4]]


def test_trees_without_an_asked_token_are_left_out() -> None:
    # tokens 0 to 7 are the tree of group 0, 8 to 10 that of group 1
    asked = np.zeros(11, bool)
    assert plan_microbatches(TREE, asked, 100, 2) == [[], []]
    asked[9] = True
    plans = plan_microbatches(TREE, asked, 100, 2)
    assert sorted([cut.tolist() for cut in cuts] for cuts in plans) == [[], [[5]]]
    # every micro-batch contains a collective: the rank without a tree runs an empty one
    plans = plan_microbatches(TREE, asked, 100, 2, alike=True)
    assert sorted([cut.tolist() for cut in cuts] for cuts in plans) == [[[]], [[5]]]
    # four stages with virtual stages
    assert [len(cuts) for cuts in plan_microbatches(TREE, asked, 100, 1, multiple=4)] == [4]


def test_padding_is_a_root_behind_the_others() -> None:
    assert pad(TREE, 1) is TREE
    assert pad(TREE, 11) is TREE
    longer = pad(TREE, 4)  # 11 tokens, and one more
    assert longer.offsets.tolist() == [*TREE.offsets.tolist(), 12]
    assert longer.parents.tolist() == [*TREE.parents.tolist(), -1]
    assert longer.token_ids[:11].tolist() == TREE.token_ids.tolist()
    assert longer.positions.tolist() == [*TREE.positions.tolist(), 0]
    assert len(pad(TREE, 4, at_least=17).token_ids) == 20
    nothing = select(TREE, np.zeros(0, np.int64)).segments
    alone = pad(nothing, 3)
    assert (alone.offsets.tolist(), alone.parents.tolist()) == ([0, 3], [-1])
    check_segments(alone, vocab_size=1, max_length=3)
    check_segments(longer, vocab_size=64, max_length=6)


def test_karmarkar_karp_on_the_textbook_example() -> None:
    # 4 5 6 7 8 by largest differencing into two: {8, 6} and {7, 5, 4} (Korf 1998)
    parts = karmarkar_karp([4, 5, 6, 7, 8], 2)
    assert sorted(sum([4, 5, 6, 7, 8][i] for i in part) for part in parts) == [14, 16]
    assert karmarkar_karp([3], 3) == [[], [], [0]]
    assert karmarkar_karp([], 2) == [[], []]


def test_ranks_are_balanced_by_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 1000, 64)
    segments = make_segments([[1] * n for n in lengths.tolist()], [-1] * 64, list(range(64)))
    plan = plan_microbatches(segments, everywhere(segments), 2000, 4)
    loads = [sum(int(lengths[cut].sum()) for cut in cuts) for cuts in plan]
    assert max(loads) - min(loads) <= 0.01 * sum(loads) / 4


def test_select_renumbers_parents() -> None:
    part = select(TREE, np.array([5]))
    assert part.source.tolist() == [8, 9, 10]
    assert part.segments.parents.tolist() == [-1]
    part = select(TREE, np.array([0, 1, 2, 3, 4]))
    assert part.segments.token_ids.tolist() == [5, 6, 10, 11, 12, 13, 14, 20]
    assert part.segments.parents.tolist() == [-1, 0, 1, 1, 0]
    assert part.segments.predecessors.tolist() == TREE.predecessors[:8].tolist()


def test_flatten_repeats_prefixes_and_marks_first_copies() -> None:
    flat, first = flatten_trees(TREE)
    sequences = np.split(flat.segments.token_ids, flat.segments.offsets[1:-1])
    assert [s.tolist() for s in sequences] == [
        [5, 6, 10, 11, 12],
        [5, 6, 10, 11, 13, 14],
        [5, 6, 20],
        [30, 31, 32],
    ]
    assert flat.segments.groups.tolist() == [0, 0, 0, 1]
    assert np.array_equal(TREE.token_ids[flat.source], flat.segments.token_ids)
    assert np.array_equal(TREE.positions[flat.source], flat.segments.positions)
    assert first.astype(int).tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]


@given(forests())
@settings(max_examples=50, deadline=None)
def test_flatten_counts_every_token_once(forest: Segments) -> None:
    flat, first = flatten_trees(forest)
    assert sorted(flat.source[first]) == list(range(len(forest.token_ids)))


def test_routes_follow_their_tokens() -> None:
    tree = replace(TREE, routes=np.arange(22, dtype=np.uint8).reshape(11, 2, 1))
    assert tree.part(5, 6)[0].routes_of(slice(None)).ravel().tolist() == [16, 17, 18, 19, 20, 21]
    assert select(tree, np.array([5])).segments.routes.ravel().tolist() == [16, 17, 18, 19, 20, 21]
    flat, _ = flatten_trees(tree)
    assert flat.segments.routes[:, 0, 0].tolist() == (2 * flat.source).tolist()
    padded = pad(tree, 6).routes
    assert padded.shape == (12, 2, 1)
    assert padded[10:].ravel().tolist() == [20, 21, 255, 255]


def test_bad_segments_are_refused_with_what_is_wrong() -> None:
    check_segments(TREE, vocab_size=64, max_length=6)
    with pytest.raises(UserError, match="has 6 tokens, the model takes at most 5"):
        check_segments(TREE, vocab_size=64, max_length=5)
    with pytest.raises(UserError, match="token id 31 is outside the model's vocabulary of 31"):
        check_segments(TREE, vocab_size=31, max_length=6)
    with pytest.raises(UserError, match="malformed"):
        check_segments(make_segments([[1], [2]], [-1, 1], [0, 0]), vocab_size=64, max_length=6)


def policy_batch(segments: Segments, loss_weights: list[float], samples: list[int]) -> PolicyBatch:
    """Advantages, rollout and old logprobs encode the token that they belong to."""
    numbers = np.arange(len(loss_weights), dtype=np.float32)
    return PolicyBatch(
        segments,
        samples=np.array(samples, np.int32),
        loss_weights=np.array(loss_weights, np.float32),
        advantages=numbers,
        rollout_logprobs=-numbers,
        old_logprobs=-2 * numbers,
        ref_logprobs=None,
    )


def test_take_keeps_all_that_a_batch_says_about_its_tokens() -> None:
    # row 1 alone: tokens 8 to 10
    batch = policy_batch(TREE, [0, 0, *[1] * 6, 0, 1, 1], [-1, -1, *[0] * 5, 1, -1, 2, 2])
    part = take(batch, select(TREE, np.array([5])))
    assert part.samples.tolist() == [-1, 2, 2]
    assert part.loss_weights.tolist() == [0, 1, 1]
    assert part.advantages.tolist() == [8, 9, 10]
    assert part.rollout_logprobs.tolist() == [-8, -9, -10]
    assert part.old_logprobs is not None
    assert part.old_logprobs.tolist() == [-16, -18, -20]
    assert part.ref_logprobs is None
    assert part.segments.token_ids.tolist() == [30, 31, 32]
    numbers = np.arange(11, dtype=np.float32)
    values = take(ValueBatch(TREE, numbers, numbers + 1, numbers + 2), select(TREE, np.array([5])))
    assert (values.values.tolist(), values.returns.tolist()) == ([9, 10, 11], [10, 11, 12])


def test_flattened_branches_of_a_sample_stay_in_one_microbatch() -> None:
    # Flat: paths of sample 0 (5 and 6 tokens), of sample 1 (3), of sample 2 (3). Budget 6 would cut sample 0.
    flat, _ = flatten_trees(TREE)
    samples = np.array([-1, -1, *[0] * 5, 1, 2, 2, 2], np.int32)[flat.source]
    asked = everywhere(flat.segments)
    plan = plan_microbatches(flat.segments, asked, 6, 1, samples)
    assert [cut.tolist() for cut in plan[0]] == [[0, 1], [2, 3]]
    assert [0, 1] not in [cut.tolist() for cut in plan_microbatches(flat.segments, asked, 6, 1)[0]]


def test_conversations_of_a_sample_stay_in_one_microbatch() -> None:
    # sample 0 is in trees 0 and 2, sample 1 in 2 and 4, samples 2 and 3 in one each
    segments = make_segments([[1, 2]] * 5, [-1] * 5, [0] * 5)
    samples = np.array([-1, 0, -1, 2, 0, 1, -1, 3, -1, 1], np.int32)
    (plan,) = plan_microbatches(segments, everywhere(segments), 2, 1, samples)
    assert sorted(cut.tolist() for cut in plan) == [[0, 2, 4], [1], [3]]
    (plan,) = plan_microbatches(segments, everywhere(segments), 2, 1)
    assert sorted(cut.tolist() for cut in plan) == [[0], [1], [2], [3], [4]]


def test_segments_without_tokens_may_stand_above_others() -> None:
    # an empty root above two segments, the first of which has an empty one above two more
    segments = make_segments([[], [5, 6], [], [7], [8, 9], [3]], [-1, 0, 1, 2, 2, 0], [0] * 6)
    check_segments(segments, vocab_size=64, max_length=4)
    assert segments.positions.tolist() == [0, 1, 2, 2, 3, 0]
    assert segments.predecessors.tolist() == [-1, 0, 1, 1, 3, -1]
    # empty ones that do not lie behind what is above them: 7 follows 5, and 8 nothing
    apart = make_segments([[5], [6], [], [7], [], [8]], [-1, 0, 0, 2, -1, 4], [0] * 6)
    assert apart.predecessors.tolist() == [-1, 0, 0, -1]
    flat, first = flatten_trees(segments)
    sequences = np.split(flat.segments.token_ids, flat.segments.offsets[1:-1])
    assert [s.tolist() for s in sequences] == [[5, 6, 7], [5, 6, 8, 9], [3]]
    assert first.astype(int).tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
    weights = np.array([0, 1, 1, 1, 1, 0], np.float32)
    check_batch(SupervisedBatch(segments, weights))
    with pytest.raises(UserError, match="first token of a root"):
        check_batch(SupervisedBatch(segments, weights + 1))


ROW = make_segments([[1, 2, 3]], [-1], [0])
ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "batch",
    [
        policy_batch(ROW, [0, 1, 1], [-1, 0, 0]),
        # two conversations of one sample
        policy_batch(make_segments([[1, 2], [4, 5]], [-1, -1], [0, 0]), [0, 1, 0, 1], [-1, 0, -1, 0]),
        ValueBatch(ROW, ZEROS, ZEROS, ZEROS),
        SupervisedBatch(ROW, ZEROS),
    ],
)
def test_good_batches_pass(batch: Batch) -> None:
    check_batch(batch)


TWO_GROUPS = make_segments([[1, 2, 3], [4, 5]], [-1, -1], [0, 1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (SupervisedBatch(ROW, ZEROS[:2]), "3 tokens, but 2 loss_weights"),
        (ValueBatch(ROW, ZEROS, ZEROS, ZEROS[:2]), "3 tokens, but 2 returns"),
        (policy_batch(ROW, [0, 1, 1], [-1, 0]), "3 tokens, but 2 samples"),
        (ValueBatch(ROW, ZEROS, ZEROS * np.nan, ZEROS), "values hold NaN"),
        (SupervisedBatch(ROW, ZEROS + 1), "first token of a root"),
        (policy_batch(ROW, [0, 1, 1], [-1, -1, 0]), "belongs to no sample"),
        (policy_batch(ROW, [0, 1, 1], [-1, 1, 0]), "must ascend"),
        (policy_batch(TWO_GROUPS, [0, 1, 1, 0, 1], [-1, 0, 0, -1, 0]), "sample 0 lie in two groups"),
    ],
)
def test_bad_batches_are_refused_with_what_is_wrong(batch: Batch, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_batch(batch)
