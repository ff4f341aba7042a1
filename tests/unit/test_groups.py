"""Groups on their way, the filters, and what a filter may leave out, by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.config.schema import FilterConfig
from atoll.coordinator.algorithm.filters import DynamicSampling, scores_differ
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.dump import read_dump, write_dump
from atoll.runtime.errors import AtollError
from atoll.wire.types import (
    Graded,
    Group,
    Sampling,
    Trajectory,
    TrajectoryStatus,
    TurnRequest,
    TurnReward,
    Version,
)
from tests import builders
from tests.builders import group_id, node, prompt, sample_id

ID = group_id(7)
PROMPT = prompt(7, [1, 2])
SAMPLING = Sampling(8, temperature=0.7, top_p=0.9, stop_token_ids=(1,), stop=("\n",), seed=3)
GREEDY = Sampling(8, temperature=0.0, top_p=0.9, stop_token_ids=(1,), stop=("\n",), seed=3)


def sample(index: int, versions: tuple[int, ...], *rewards: TurnReward, attempt: int = 0) -> Trajectory:
    """One token per version."""
    tokens = node([5 + attempt] * len(versions), versions=[Version("l", number) for number in versions])
    return builders.sample(sample_id(7, index), tokens, rewards=rewards, attempt=attempt)


def scored(*values: tuple[float, float]) -> Group:
    """By each sample's accuracy and penalty; the score is their sum."""
    rewards = [TurnReward(0, a + b, {"gsm8k": a, "overlong": b}) for a, b in values]
    return builders.group(*(sample(i, (4,), reward) for i, reward in enumerate(rewards)), ids=[1, 2])


def drawn(request: TurnRequest) -> list[tuple[int, int]]:
    """Index and attempt of each."""
    return [(id.sample.index, id.attempt) for id in request.ids]


def test_staleness_counts_from_the_oldest_token() -> None:
    assert sample(0, (3, 4)).staleness(Version("l", 6)) == 3
    assert sample(0, ()).staleness(Version("l", 6)) == 0  # no token, nothing stale


def test_pending_group_first_attempt_wins_and_a_retry_starts_over() -> None:
    pending = PendingGroup(PROMPT, 0, SAMPLING, [None, None], issued=3)
    first, second = sample(0, (4,)), sample(0, (4,), attempt=1)
    assert pending.accept(first)
    assert not pending.accept(second)
    pending.grade(Graded(first.id, 0.5, {"exact_match": 0.5}))
    assert (pending.missing, pending.complete, pending.oldest) == ((1,), False, [4, 3])
    pending.accept(sample(1, (5,)))
    pending.grade(Graded(sample_id(7, 1), 1.0, {}))
    assert pending.complete
    assert [s.score for s in pending.group().samples] == [0.5, 1.0]
    assert pending.group().baseline is None
    assert pending.stale_indices(Version("l", 5), max_staleness=0) == [0]
    pending.begin_next_attempt([0])
    assert (pending.missing, pending.attempts, pending.complete) == ((0,), [1, 0], False)
    pending.grade(Graded(first.id, 0.5, {}))  # a verdict that comes late for the replaced sample
    assert not pending.complete


@pytest.mark.parametrize("weighs_turns", [False, True])
def test_a_single_turn_is_as_old_as_its_oldest_token_either_way(weighs_turns: bool) -> None:
    samples = [sample(0, (3, 4)), sample(1, (5,)), sample(2, ())]
    pending = PendingGroup(PROMPT, 0, SAMPLING, samples, issued=4, weighs_turns=weighs_turns)
    assert pending.oldest == [3, 5, 4]  # the last one has no token
    assert pending.stale_indices(Version("l", 5), max_staleness=1) == [0]


def test_a_sample_of_several_turns_is_as_old_as_its_oldest_or_its_freshest_one() -> None:
    first = node([5, 6], versions=[Version("l", 2), Version("l", 6)])  # a push came between
    tool = node([7], [0], parent=0)
    second = node([8], parent=1, versions=Version("l", 4))
    third = node([9], parent=2, versions=Version("l", 3))
    turns = builders.sample(sample_id(7, 0), first, tool, second, third)
    assert turns.turn_numbers() == [2, 4, 3]
    oldest = PendingGroup(PROMPT, 0, SAMPLING, [turns], issued=0)
    freshest = PendingGroup(PROMPT, 0, SAMPLING, [None], issued=0, weighs_turns=True)
    freshest.accept(turns)
    assert (oldest.oldest, freshest.oldest) == ([2], [4])
    assert oldest.stale_indices(Version("l", 5), max_staleness=1) == [0]
    assert freshest.stale_indices(Version("l", 5), max_staleness=1) == []
    assert freshest.stale_indices(Version("l", 6), max_staleness=1) == [0]
    assert (turns.staleness(Version("l", 6)), turns.staleness(Version("l", 6), oldest=3)) == (4, 3)


@pytest.mark.parametrize("weighs_turns", [False, True])
def test_turns_that_are_not_trained_on_do_not_age_a_sample(weighs_turns: bool) -> None:
    nodes = [node([5], parent=i - 1, versions=Version("l", number)) for i, number in enumerate((2, 4, 5))]
    made = builders.sample(sample_id(7, 0), *nodes)

    def age(*untrained: int, status: TrajectoryStatus = TrajectoryStatus.COMPLETED) -> int:
        turns = [turn._replace(untrained=turn.node in untrained) for turn in made.turns]
        pending = PendingGroup(PROMPT, 0, SAMPLING, [None], issued=1, weighs_turns=weighs_turns)
        pending.accept(made._replace(turns=tuple(turns), status=status))
        assert pending.stale_indices(Version("l", pending.oldest[0] + 1), max_staleness=0) == [0]
        assert pending.stale_indices(Version("l", pending.oldest[0]), max_staleness=0) == []
        return pending.oldest[0]

    assert age() == (5 if weighs_turns else 2)
    assert age(0) == (5 if weighs_turns else 4)
    assert age(2) == (4 if weighs_turns else 2)
    assert age(0, 2) == 4
    assert age(0, 1, 2) == age(status=TrajectoryStatus.ABORTED) == sys.maxsize  # never too old
    title = made._replace(nodes=made.nodes[:1], turns=(made.turns[0]._replace(untrained=True),))
    assert (title.turn_numbers(), title.staleness(Version("l", 6))) == ([], 0)


def test_an_open_session_is_at_least_as_old_as_its_first_turn() -> None:
    agents = replace(PROMPT, agent="toy")
    waits, weighs = (
        PendingGroup(agents, 0, SAMPLING, [None, None], issued=1, weighs_turns=weighs)
        for weighs in (False, True)
    )
    for group in (waits, weighs):
        assert group.note_session(0, 0, Version("l", 3))
        assert group.note_session(0, 0, Version("l", 4))  # a later turn makes it no younger
        assert not group.note_session(1, 1, Version("l", 4))  # of an attempt that is not there
        assert group.oldest == [3, 1]
    assert (waits.oldest_number, weighs.oldest_number) == (1, sys.maxsize)
    assert waits.note_session(1, 0, Version("l", 2))
    assert waits.oldest_number == 2
    waits.begin_next_attempt([1])
    assert not waits.note_session(1, 0, Version("l", 5))
    assert waits.note_session(1, 1, Version("l", 5))
    assert waits.oldest_number == 3


def test_a_baseline_is_asked_for_greedily_and_kept_apart() -> None:
    pending = PendingGroup(PROMPT, 0, SAMPLING, [None, None, None], issued=3, has_baseline=True)
    sampled, greedy = pending.requests()
    assert (drawn(sampled), sampled.sampling) == ([(0, 0), (1, 0)], SAMPLING)
    assert (drawn(greedy), greedy.sampling) == ([(2, 0)], GREEDY)
    for index, score in enumerate([1.0, 0.0, 0.25]):
        pending.accept(sample(index, (3,)))
        pending.grade(Graded(sample_id(7, index), score, {}))
    group = pending.group()
    assert [s.score for s in group.samples] == [1.0, 0.0]
    assert group.baseline is not None
    assert (group.baseline.id, group.baseline.score) == (sample_id(7, 2), 0.25)
    assert [id.index for id in pending.ids()] == [0, 1, 2]
    pending.begin_next_attempt([2])
    (again,) = pending.requests()
    assert (drawn(again), again.sampling) == ([(2, 1)], GREEDY)


def test_a_group_without_baseline_is_one_request() -> None:
    pending = PendingGroup(PROMPT, 0, SAMPLING, [None, sample(1, (3,)), None], issued=3)
    (request,) = pending.requests()
    assert (request.group, drawn(request), request.sampling) == (ID, [(0, 0), (2, 0)], SAMPLING)


def test_a_dump_carries_the_baseline(tmp_path: Path) -> None:
    with_baseline = replace(
        scored((1, 0), (0, 0)), baseline=sample(2, (3, 4), TurnReward(0, 0.25, {"a": 1.0}))
    )
    step, groups = read_dump(write_dump(tmp_path / "dumps", 5, builders.V0, [with_baseline, scored((1, 0))]))
    assert step == 5
    back = groups[0].baseline
    assert back is not None
    assert (back.id, back.score, back.rewards[0].components) == (sample_id(7, 2), 0.25, {"a": 1.0})
    np.testing.assert_array_equal(back.nodes[0].token_ids, [5, 5])
    assert back.versions() == {Version("l", 3), Version("l", 4)}
    assert [s.id.index for s in groups[0].samples] == [0, 1]
    assert groups[1].baseline is None


def test_scores_differ_by_score_or_by_one_component() -> None:
    penalised = scored((1, 0), (1, -0.5))  # both right, one too long
    assert scores_differ(penalised)
    assert not scores_differ(penalised, component="gsm8k")
    assert scores_differ(penalised, component="overlong")
    offset = scored((1, -1), (0, 0))  # right but long, and wrong: both score 0
    assert not scores_differ(offset)
    assert scores_differ(offset, component="gsm8k")
    assert not scores_differ(scored((1, 0)))


def test_an_unknown_component_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="sample toy/0/7/0 has no component 'accuracy', only gsm8k, overlong"
    ):
        scores_differ(scored((1, 0), (0, 0)), component="accuracy")


def test_refill_is_bounded_and_counted_per_batch() -> None:
    sampling = DynamicSampling(FilterConfig(name="scores_differ", max_refill=2), prompts_per_step=3)
    for _ in range(6):
        sampling.count(sampling.accepts(scored((1, 0), (1, 0))))
    sampling.count(sampling.accepts(scored((1, 0), (0, 0))))
    sampling.check()  # 6 is 2 batches of 3
    sampling.count(False)
    with pytest.raises(
        AtollError, match=r"'scores_differ' left out 7 of the 8 groups .*max_refill = 2 batches of 3; use"
    ):
        sampling.check()
    assert sampling.take_metrics() == {
        "dynamic_sampling/num_filtered": 7,
        "dynamic_sampling/kept_fraction": 0.125,
    }
    sampling.check()
    assert sampling.take_metrics() == {
        "dynamic_sampling/num_filtered": 0,
        "dynamic_sampling/kept_fraction": 1,
    }


def test_a_filters_parameters_come_from_the_config() -> None:
    config = FilterConfig.model_validate({"name": "scores_differ", "component": "gsm8k"})
    assert not DynamicSampling(config, 1).accepts(scored((1, 0), (1, -0.5)))


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("group.samples", "TypeError: it returned None, expected True or False"),
    ],
)
def test_a_users_filter_that_fails_is_an_error_with_its_name(tmp_path: Path, body: str, cause: str) -> None:
    file = tmp_path / "filters.py"
    file.write_text(f"def mine(group):\n    {body}\n")
    sampling = DynamicSampling(FilterConfig(name=f"{file}:mine"), 1)
    with pytest.raises(AtollError, match=f"filters.py:mine' failed on group toy/0/7: {cause}; fix"):
        sampling.accepts(scored((1, 0)))
