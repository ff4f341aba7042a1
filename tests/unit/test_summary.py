"""How a run ended, and whether it learned something."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.config.schema import RunSection
from atoll.coordinator.algorithm.metrics import step_metrics
from atoll.coordinator.summary import Outcome, write_summary
from atoll.wire.types import Version
from tests.builders import group, node, sample, sample_id
from tests.fakes import FakeRun, ListSource, batch


def summary_of(folder: Path, rows: list[dict[str, float]], window: int = 10) -> dict[str, Any]:
    run = RunSection(name="toy", steps=100, target_window=window)
    write_summary(
        folder, run, rows, Outcome.FINISHED, steps=len(rows), seconds=1.0, best=None, checkpoint=None
    )
    return dict(json.loads((folder / "summary.json").read_text()))


def scores(*values: float) -> list[dict[str, float]]:
    return [{"critic/score/mean": value} for value in values]


@pytest.mark.parametrize(
    ("values", "window", "first", "last"),
    [
        ((0.0, 0.5, 0.5, 1.0), 1, 0.0, 1.0),
        ((0.0, 0.5, 0.5, 1.0, 1.0), 10, 0.25, 1.0),  # two windows of two, not one of five twice
        ((0.25,), 10, None, 0.25),
        ((), 10, None, None),
    ],
)
def test_first_and_last_steps_do_not_overlap(
    tmp_path: Path, values: tuple[float, ...], window: int, first: float | None, last: float | None
) -> None:
    summary = summary_of(tmp_path, scores(*values), window)
    assert (summary["reward_first"], summary["reward_last"]) == (first, last)
    assert summary["reward_window"] == min(window, len(values) // 2)


def test_a_reward_that_never_moved_gets_a_hint(tmp_path: Path) -> None:
    assert "the reward was 0 in every step" in summary_of(tmp_path, scores(0.0, 0.0, 0.0))["hint"]
    assert summary_of(tmp_path, scores(0.0, 0.0, 0.25))["hint"] == ""
    assert summary_of(tmp_path, scores(0.0))["hint"] == ""


def test_groups_of_equal_scores_get_a_hint(tmp_path: Path) -> None:
    def rows(*shares: float) -> list[dict[str, float]]:
        return [
            {"critic/score/mean": step / 100, "critic/score/equal_share": share}
            for step, share in enumerate(shares)
        ]

    assert summary_of(tmp_path, rows(0.0, 0.0, 0.75, 0.5), window=2)["hint"].startswith(
        "in 62% of the last groups all answers had the same reward"
    )
    assert summary_of(tmp_path, rows(1.0, 1.0, 0.5, 0.5), window=2)["hint"] == ""


def test_groups_of_equal_scores_are_counted() -> None:
    def scored(prompt: int, *values: float) -> Any:
        return group(*(sample(sample_id(prompt, i), node([3]), score=v) for i, v in enumerate(values)))

    groups = [scored(0, 1.0, 1.0), scored(1, 0.0, 1.0), scored(2, 0.0, 0.0), scored(3, 0.0, 0.5)]
    assert step_metrics(groups, Version("a", 0))["critic/score/equal_share"] == 0.5
    assert "critic/score/equal_share" not in step_metrics([scored(0, 1.0)], Version("a", 0))


async def test_a_stopped_run_was_interrupted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    await run.control.stop()
    await run.run()
    assert run.summary()["outcome"] == "interrupted"


async def test_a_run_that_reaches_its_target_says_so(tmp_path: Path) -> None:
    sections = {"run": {"steps": 9, "target_reward": 0.7, "target_window": 1}}
    run = FakeRun(tmp_path, sections, source=ListSource([batch(1, [0.0, 1.0]), batch(2, [1.0, 1.0])]))
    await run.run()
    assert (run.summary()["outcome"], run.summary()["steps"]) == ("target reached", 2)


async def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)

    def fail(key: object) -> dict[str, float]:
        raise RuntimeError("out of luck")

    run.trainers["actor"].metrics = fail
    with pytest.raises(RuntimeError):
        await run.run()
    summary = run.summary()
    assert (summary["outcome"], summary["reason"], summary["steps"]) == ("failed", "out of luck", 0)
