"""Shares of reasons, counted by hand."""

from atoll.coordinator.algorithm.metrics import MAX_KINDS, ReasonShares
from atoll.wire.types import Group, TurnReward
from tests import builders
from tests.builders import node, sample, sample_id


def group(*reasons: dict[str, str]) -> Group:
    """A sample for each, with its reasons by grader."""
    rewards = [TurnReward(0, 1.0, dict.fromkeys(given, 1.0), given) for given in reasons]
    samples = [sample(sample_id(0, i), node([3]), rewards=(reward,)) for i, reward in enumerate(rewards)]
    return builders.group(*samples)


def test_shares_are_of_all_samples_of_the_step_by_kind() -> None:
    reasons = ReasonShares()
    first = group({"code": "timeout: case 3"}, {"code": "timeout: case 1", "maths": "no box"}, {}, {})
    second = group({"code": "wrong: case 1"}, {"code": "right"}, {"code": "right"}, {})
    assert reasons.measure([first, second]) == {
        "reward/code/timeout": 2 / 8,
        "reward/code/right": 2 / 8,
        "reward/code/wrong": 1 / 8,
        "reward/maths/no box": 1 / 8,
    }
    assert reasons.measure([group({"code": "right"}, {"code": "right"})]) == {
        "reward/code/timeout": 0.0,
        "reward/code/right": 1.0,
        "reward/code/wrong": 0.0,
        "reward/maths/no box": 0.0,
    }


def test_a_grader_that_says_something_else_each_time_makes_no_metric_of_each() -> None:
    reasons = ReasonShares()
    talk = [{"chatty": f"thought {index}"} for index in range(30)]
    shares = reasons.measure([group(*talk, {"chatty": "right"}, {"chatty": "right"})])
    assert len(shares) == MAX_KINDS + 1
    assert shares["reward/chatty/right"] == 2 / 32  # the most frequent kinds come first
    assert shares["reward/chatty/other"] == (30 - (MAX_KINDS - 1)) / 32
    later = reasons.measure([group({"chatty": "something new"}, {"chatty": "x" * 1000})])
    assert later.keys() == shares.keys()
    assert later["reward/chatty/other"] == 1.0
