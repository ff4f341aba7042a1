"""Graders on cases worked out by hand and on every row of the GSM8K sample; invalid grades."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from atoll.config.errors import ConfigError
from atoll.config.functions import load
from atoll.config.schema import GraderConfig
from atoll.reward.graders import GraderPanel
from atoll.reward.isolated_grader import with_logged_errors
from atoll.reward.score import (
    GRADERS,
    ISOLATED,
    ROUTED,
    SANDBOXED,
    Failure,
    Grader,
    Outcome,
    check_grade,
    combine,
    failure,
    judge,
)
from atoll.reward.verifiers.exact_match import exact_match
from atoll.reward.verifiers.gsm8k import extract_answer, gsm8k, gsm8k_format
from atoll.runtime.errors import SandboxError, UserError
from atoll.wire.types import (
    FinishReason,
    Grade,
    Graded,
    GradingError,
    GroupId,
    SampleId,
    ScoreItem,
    Verdict,
)

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


async def score(item: ScoreItem, *configs: GraderConfig) -> Verdict:
    panel = await GraderPanel.start(configs, sandbox=None, programs=0)
    ((verdict,),) = [verdicts async for verdicts in panel.verdicts([item])]
    return verdict


async def test_the_sum_is_weighted_and_components_are_kept_whole() -> None:
    graders = [GraderConfig(name="gsm8k", weight=2.0), GraderConfig(name="gsm8k_format", weight=0.25)]
    right = await score(item("#### 46"), *graders)
    assert right == Graded(item("").id, 2.25, {"gsm8k": 1.0, "gsm8k_format": 1.0})
    wrong = await score(item("#### 47"), *graders)
    assert wrong == Graded(item("").id, 0.25, {"gsm8k": 0.0, "gsm8k_format": 1.0})


async def test_a_sum_of_shaping_and_correctness_keeps_every_component_and_reason() -> None:
    graders = [
        GraderConfig.model_validate({"name": "exact_match", "answer": "tag"}),
        GraderConfig(name="think_format", weight=0.1),
        GraderConfig.model_validate({"name": "repetition", "ngram": 1, "weight": 0.5}),
        GraderConfig.model_validate({"name": "length_target", "tokens": 13, "alpha": 0.01, "weight": 2.0}),
        GraderConfig(name="length_cost", weight=0.0),
    ]
    # 2 distinct words of 4; 3 tokens, 10 fewer than the target
    verdict = await score(item("no no no answer"), *graders)
    assert isinstance(verdict, Graded)
    assert verdict.components == pytest.approx(
        {
            "exact_match": 0.0,
            "think_format": 0.0,
            "repetition": -0.5,
            "length_target": -0.1,
            "length_cost": 3.0,
        }
    )
    assert verdict.reasons == {"exact_match": "no answer", "think_format": "missing tag"}
    assert verdict.value == pytest.approx(0.0 + 0.0 - 0.25 - 0.2 + 0.0)


def raising(error: BaseException) -> Grader:
    def grade(_: ScoreItem) -> float:
        raise error

    return grade


@pytest.mark.parametrize(
    ("grade", "cause", "retryable"),
    [
        (raising(KeyError("solution")), "KeyError: 'solution'", False),
        (raising(ConnectionRefusedError("judge:8000")), "ConnectionRefusedError: judge:8000", True),
        (raising(SandboxError("no namespaces")), "SandboxError: no namespaces", True),
        (raising(SystemExit(3)), "SystemExit: 3", False),
        (raising(ValueError("x" * 5000)), "ValueError: " + "x" * 988, False),  # 1,000 characters
        (lambda _: math.nan, "ValueError: got nan, expected a finite number", False),
        (lambda _: -math.inf, "ValueError: got -inf, expected a finite number", False),
        (lambda _: Grade(math.nan, "odd"), "ValueError: got nan, expected a finite number", False),
        (lambda _: None, "TypeError: got NoneType None, expected a number", False),
        (lambda _: "1.0", "TypeError: got str '1.0', expected a number", False),
        (lambda _: 10**400, "OverflowError: int too large to convert to float", False),
    ],
)
def test_a_reward_that_cannot_be_computed_is_an_error_with_its_cause(
    grade: Grader, cause: str, retryable: bool
) -> None:
    assert judge(grade, item("46")) == Failure(cause, retryable)
    outcomes: dict[str, Outcome] = {"exact_match": Grade(1.0), "mine": judge(grade, item("46"))}
    verdict = combine(item("").id, {"exact_match": 1.0, "mine": 0.5}, outcomes)
    assert verdict == GradingError(item("").id, "mine", cause, retryable)


@pytest.mark.parametrize(
    ("value", "weight", "score"), [(1e308, 10.0, "inf"), (1.0, math.nan, "nan"), (0.0, math.inf, "nan")]
)
def test_a_sum_that_is_no_finite_number_is_an_error(value: float, weight: float, score: str) -> None:
    verdict = combine(item("").id, {"a": weight, "b": 1.0}, {"a": Grade(value), "b": Grade(1.0)})
    cause = f"got a weighted sum of {score}, expected a finite number"
    assert verdict == GradingError(item("").id, "", cause, retryable=False)


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.True_, np.array(1), Grade(True), Grade(np.float64(1))]
)
def test_every_kind_of_number_is_a_reward(value: float | Grade) -> None:
    outcome = judge(lambda _: value, item("46"))
    assert outcome == Grade(1.0, "")
    assert type(outcome) is Grade
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("", ""),
        ("no answer", "no answer"),
        ("timeout: case 3", "timeout: case 3"),
        ("k" * 50, "k" * 40),  # a kind is part of a metric's name
        ("k" * 50 + ": detail", "k" * 40 + ": detail"),
        ("wrong: " + "d" * 400, "wrong: " + "d" * 293),  # 300 characters in all
    ],
)
def test_reasons_are_short_and_stand_by_component(reason: str, kept: str) -> None:
    outcome = judge(lambda _: Grade(0.5, reason), item("46"))
    assert outcome == Grade(0.5, kept)
    verdict = combine(item("").id, {"a": 2.0, "b": 1.0}, {"a": outcome, "b": Grade(1.0)})
    assert verdict == Graded(item("").id, 2.0, {"a": 0.5, "b": 1.0}, {"a": kept} if kept else {})


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (0, 0.0),
        (6, 0.0),  # 8 - 2 tokens are free
        (7, -0.25),  # half of the buffer: -1/2 * 0.5
        (8, -0.5),
        (10, -0.5),  # DAPO's eq. 13 ends at -1, times 0.5
    ],
)
def test_overlong(tokens: int, value: float) -> None:
    config = GraderConfig.model_validate({"name": "overlong", "max_tokens": 8, "buffer": 2, "penalty": 0.5})
    assert judge(load(config, GRADERS), item("")._replace(response_length=tokens)) == Grade(value)


async def test_a_cost_is_a_component_and_no_part_of_the_score() -> None:
    cost = GraderConfig.model_validate({"name": "length_cost", "weight": 0.0, "per_token": 0.5})
    # 3 tokens of 0.5
    assert await score(item("46"), GraderConfig(name="exact_match"), cost) == Graded(
        item("").id, 1.0, {"exact_match": 1.0, "length_cost": 1.5}
    )


async def test_without_graders_the_score_is_zero() -> None:
    assert await score(item("46")) == Graded(item("").id, 0.0, {})


@pytest.mark.parametrize("setting", [{"concurrency": 2}, {"deadline_s": 5.0}])
async def test_settings_without_effect_are_refused(setting: dict[str, float]) -> None:
    config = GraderConfig.model_validate({"name": "exact_match", **setting})
    with pytest.raises(UserError, match=r"exact_match takes no time .* remove them"):
        await score(item("46"), config)
    resolved = GraderConfig.model_validate(GraderConfig(name="exact_match").model_dump())
    assert await score(item("46"), resolved) == Graded(item("").id, 1.0, {"exact_match": 1.0})


def test_every_way_to_run_names_graders_that_exist_and_one_way_each() -> None:
    ways = [*ISOLATED, *SANDBOXED, *ROUTED]
    assert set(ways) <= set(GRADERS)
    assert len(ways) == len(set(ways))


def test_a_users_own_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(item, *, scale=1.0):\n    return scale / item.response_length\n")
    config = GraderConfig.model_validate({"name": f"{file}:brevity", "scale": 6.0})
    source = file.read_bytes()
    file.write_text("def brevity(item, *, scale=1.0):\n    return -1.0\n")
    assert judge(load(config, GRADERS, source), item("46")) == Grade(2.0)
    assert judge(load(config, GRADERS), item("46")) == Grade(-1.0)


def test_graders_that_cannot_be_imported_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import absent_module\ndef f(item): return 1.0\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: ModuleNotFoundError"):
        load(GraderConfig(name=f"{tmp_path}/mine.py:f"), GRADERS)


def test_a_reason_that_quotes_a_response_fits_a_message_and_a_line() -> None:
    assert (
        check_grade(Grade(0.0, "exception: \ud800 \x1b[2J\n\u00e9")).reason
        == r"exception: \ud800 \x1b[2J\n" + "\u00e9"
    )
    assert failure(ValueError("a\ud800\nb")).cause == r"ValueError: a\ud800\nb"


def test_a_graders_error_names_its_line_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "g.py"
    file.write_text(
        "def column(item):\n    return item.extra['answer']\n\ndef grade(item):\n    return column(item)\n"
    )
    config = GraderConfig(name=f"{file}:grade")
    grade = with_logged_errors(load(config, {}), config.name, str(file))
    for _ in range(3):
        assert judge(grade, item(""), str(file)) == Failure("KeyError: 'answer' (g.py:2)", retryable=False)
    (record,) = caplog.records
    assert "raised an error on" in record.getMessage()
    assert "line 5, in grade" in (record.exc_text or "")
