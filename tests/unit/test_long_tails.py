"""Ideal list scheduling by hand, and that the coordinator keeps slots as busy."""

import numpy as np
import pytest

from benchmarks.long_tails import SLOTS, Case, compare, list_schedule


def test_a_step_begins_once_the_version_before_the_last_is_published() -> None:
    lengths = np.array([[4.0, 1.0], [2.0, 2.0], [3.0, 1.0]])  # of a step each
    # one at a time: 4 s, 2 s and 3 s
    assert list_schedule(lengths, 2, groups_per_step=1, max_staleness=0) == 9
    # slot 1: 4 s of step 1, 3 s of step 3 from version 1 on; slot 2: 1, 2 and 2 s, then 1 s
    assert list_schedule(lengths, 2, groups_per_step=1, max_staleness=1) == 4 + 3
    # slots are free all the time: steps 1 and 2 run from 0 s on, step 3 from 4 s on
    assert list_schedule(lengths, 9, groups_per_step=1, max_staleness=1) == 7
    assert list_schedule(lengths, 9, groups_per_step=1, max_staleness=2) == 4
    # a step of two groups: everything of it begins at once; one slot works without a break
    assert list_schedule(np.array([[4.0], [1.0], [2.0], [2.0]]), 9, groups_per_step=2, max_staleness=0) == 6
    assert list_schedule(lengths, 1, groups_per_step=1, max_staleness=1) == 13


@pytest.mark.parametrize(
    "case",
    [
        Case(replicas=2, steps=8, turn_s=10.0, places=2 * SLOTS, partial_rollouts=False),
        Case(replicas=2, steps=8, turn_s=10.0, places=4 * SLOTS, partial_rollouts=False),
        Case(replicas=2, steps=8),
    ],
    ids=["sessions", "more sessions than slots", "single turns"],
)
def test_the_coordinator_keeps_slots_as_busy_as_list_scheduling(case: Case) -> None:
    result = compare(case)
    assert result["ratio"] >= 0.9
    assert result["busy"] == pytest.approx(result["busy_ideal"] * result["ratio"])
