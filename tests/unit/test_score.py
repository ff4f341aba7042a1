"""Graders by hand-worked cases and by every row of the GSM8K sample; what becomes of bad ones."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.config.errors import ConfigError
from services.config.schema import GraderConfig
from services.reward.score import WeightedGrader, load_graders, score
from services.reward.verifiers.exact_match import exact_match
from services.reward.verifiers.gsm8k import extract_answer, gsm8k, gsm8k_format
from services.wire.types import FinishReason, Graded, GradingError, GroupId, SampleId, ScoreItem

SAMPLE = Path(__file__).parents[2] / "examples" / "data" / "gsm8k"


def item(response: str, ground_truth: str = "46") -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("toy", 0, 7), 1),
        prompt="12+34=",
        response=response,
        ground_truth=ground_truth,
        data_source="arithmetic",
        finish_reason=FinishReason.STOP,
        response_length=3,
    )


@pytest.mark.parametrize(
    ("response", "value"), [("46", 1.0), (" 46\n", 1.0), ("4 6", 0.0), ("046", 0.0), ("", 0.0)]
)
def test_exact_match(response: str, value: float) -> None:
    assert exact_match(item(response)) == value


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [
        ("#### 46", "46", 1.0),
        ("so 12+34 = 46\n#### 46\n", "46", 1.0),
        ("46", "46", 0.0),  # no marker
        ("####46", "46", 0.0),
        ("#### 1,234,567", "1234567", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 0.5", "0.5", 1.0),
        ("#### 46.", "46", 0.0),  # compared as a string
        ("#### 46.0", "46", 0.0),
        ("#### 45\n#### 46", "46", 1.0),  # the last one counts
        ("#### 46\n#### 45", "46", 0.0),
        ("#### 46 dollars", "46", 1.0),
        ("#### $46", "46", 0.0),
        ("#### 46" + " " * 293, "46", 1.0),  # 300 characters
        ("#### 46" + " " * 294, "46", 0.0),
    ],
)
def test_gsm8k(response: str, ground_truth: str, value: float) -> None:
    assert gsm8k(item(response, ground_truth)) == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("#### 7", 1.0),
        ("12+34=46\n#### 1,046.5\n", 1.0),
        ("#### -3  ", 1.0),
        ("46", 0.0),
        ("the answer is #### 46", 0.0),
        ("#### 46\nand more", 0.0),
        ("#### 46 dollars", 0.0),
        ("#### ", 0.0),
        ("#### ,", 0.0),
        ("#### 4.6.", 0.0),
    ],
)
def test_gsm8k_format(response: str, value: float) -> None:
    assert gsm8k_format(item(response)) == value


def test_every_gold_answer_of_the_sample_scores_and_its_neighbours_does_not() -> None:
    rows = [
        json.loads(line)
        for name in ("train", "test")
        for line in (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 250
    # independent of the regular expression: the dataset puts the answer after the last "#### "
    gold = [row["answer"].rpartition("#### ")[2].strip().replace(",", "") for row in rows]
    for i, row in enumerate(rows):
        neighbour = gold[(i + 1) % len(rows)]
        assert gsm8k(item(row["answer"], gold[i])) == 1.0
        assert gsm8k_format(item(row["answer"])) == 1.0
        assert gsm8k(item(row["answer"], neighbour)) == float(neighbour == gold[i])


def test_no_answer_is_none() -> None:
    assert extract_answer("I do not know") is None


def test_the_sum_is_weighted_and_components_are_kept_whole() -> None:
    graders = load_graders(
        [GraderConfig(name="gsm8k", weight=2.0), GraderConfig(name="gsm8k_format", weight=0.25)]
    )
    right = score(item("#### 46"), graders)
    assert right == Graded(item("").id, 2.25, {"gsm8k": 1.0, "gsm8k_format": 1.0})
    wrong = score(item("#### 47"), graders)
    assert wrong == Graded(item("").id, 0.25, {"gsm8k": 0.0, "gsm8k_format": 1.0})


def raising(_: ScoreItem) -> float:
    raise KeyError("solution")


def unreachable(_: ScoreItem) -> float:
    raise ConnectionRefusedError("judge:8000")


@pytest.mark.parametrize(
    ("grade", "cause", "retryable"),
    [
        (raising, "KeyError: 'solution'", False),
        (unreachable, "ConnectionRefusedError: judge:8000", True),
        (lambda _: math.nan, "ValueError: got nan, expected a finite number", False),
        (lambda _: -math.inf, "ValueError: got -inf, expected a finite number", False),
        (lambda _: None, "TypeError: got NoneType None, expected a number", False),
        (lambda _: "1.0", "TypeError: got str '1.0', expected a number", False),
        (lambda _: 10**400, "OverflowError: int too large to convert to float", False),
    ],
)
def test_a_reward_that_cannot_be_computed_is_an_error_with_its_cause(
    grade: Callable[[ScoreItem], float], cause: str, retryable: bool
) -> None:
    graders = (WeightedGrader("exact_match", 1.0, exact_match), WeightedGrader("mine", 0.5, grade))
    assert score(item("46"), graders) == GradingError(item("").id, "mine", cause, retryable)


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.int64(1)])
def test_every_kind_of_number_is_a_reward(value: float) -> None:
    verdict = score(item("46"), [WeightedGrader("mine", 0.5, lambda _: value)])
    assert verdict == Graded(item("").id, 0.5, {"mine": 1.0})
    assert type(verdict.components["mine"]) is float


def test_a_users_own_grader(tmp_path: Path) -> None:
    file = tmp_path / "brevity.py"
    file.write_text("def brevity(item):\n    return 1 / item.response_length\n")
    (grader,) = load_graders([GraderConfig(name=f"{file}:brevity", weight=3.0)])
    assert score(item("46"), [grader]) == Graded(item("").id, 1.0, {f"{file}:brevity": 1 / 3})


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (0, 0.0),
        (6, 0.0),  # 8 - 2 tokens are free
        (7, -0.25),  # half of the buffer: -1/2 * 0.5
        (8, -0.5),
        (10, -1.0),  # -4/2 * 0.5
    ],
)
def test_overlong(tokens: int, value: float) -> None:
    graders = load_graders(
        [GraderConfig.model_validate({"name": "overlong", "max_tokens": 8, "buffer": 2, "penalty": 0.5})]
    )
    verdict = score(replace(item(""), response_length=tokens), graders)
    assert verdict == Graded(item("").id, value, {"overlong": value})


def test_a_cost_is_a_component_and_no_part_of_the_score() -> None:
    costs = {"name": "length_cost", "weight": 0.0, "per_token": 0.5}
    graders = load_graders([GraderConfig(name="exact_match"), GraderConfig.model_validate(costs)])
    # 3 tokens of 0.5
    assert score(item("46"), graders) == Graded(item("").id, 1.0, {"exact_match": 1.0, "length_cost": 1.5})


def test_without_graders_the_score_is_zero() -> None:
    assert score(item("46"), load_graders([])) == Graded(item("").id, 0.0, {})


def test_graders_that_cannot_be_imported_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import absent_module\ndef f(item): return 1.0\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: ModuleNotFoundError"):
        load_graders([GraderConfig(name=f"{tmp_path}/mine.py:f")])
