"""Supervised steps before the first rollout: version numbers, step keys, and when they end."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from atoll.config.schema import WarmupSection
from atoll.coordinator.data.conversations import SupervisedSequence
from atoll.coordinator.data.datasets import SupervisedSource
from atoll.coordinator.loop import WARMUP_EXPORT
from atoll.coordinator.warmup import SupervisedWarmUp
from atoll.runtime.telemetry import metrics_of
from atoll.wire.types import Version
from tests.fakes import FakeRun

SEQUENCE = SupervisedSequence(np.array([1, 2, 3], np.int32), np.array([False, False, True]))


def warm_up(
    run: FakeRun, scores: Sequence[float] = (), *, target: float | None = None, export: Path | None = None
) -> None:
    """Five steps; the score is looked at every second one."""

    async def score(version: Version) -> float:
        await run.push(version)
        return scores[version.number - 1]

    section = WarmupSection(steps=5, rows_per_step=2, check_every=2, target_reward=target)
    rows = SupervisedSource([[SEQUENCE]], [1.0], seed=0, shuffle=True)
    run.warmup = SupervisedWarmUp(section, rows, run.trainers["actor"], run.control, score, export)


async def test_the_keys_of_warm_up_steps_never_meet_those_of_training(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 2}})
    warm_up(run)
    await run.run()
    assert [key.step for key in run.trainers["actor"].weights] == [-4, -3, -2, -1, 0, 1, 2]
    assert [event for event in run.events if event[0] == "push"] == [("push", 0), ("push", 1), ("push", 2)]
    assert metrics_of(run.rows()[0]) == {"warmup/steps": 5.0}


@pytest.mark.parametrize(
    ("scores", "steps", "versions"),
    [
        ([0.5, 0.75], 4, [1, 2, 2]),  # the version that reached the target is the first to be trained on
        ([0.5, 0.25], 5, [1, 2, 3]),  # a step after the last look makes another version
    ],
)
async def test_a_warm_up_ends_at_its_target_and_a_version_is_one_state_of_the_weights(
    tmp_path: Path, scores: list[float], steps: int, versions: list[int]
) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 1}})
    warm_up(run, scores, target=0.75)
    await run.run()
    pushes = [event[1] for event in run.events if event[0] == "push"]
    assert pushes == [*versions, versions[-1] + 1]
    assert run.rows()[0]["warmup/steps"] == steps
    assert run.rows()[0]["warmup/score/mean"] == scores[-1]


async def test_a_warm_up_that_is_stopped_is_not_saved_as_if_it_were_complete(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"checkpoint": {"at_end": True}})
    warm_up(run)
    await run.control.stop()
    await run.run()
    assert len(run.trainers["actor"].weights) == 1
    assert run.summary()["steps"] == 0
    assert run.checkpoints.steps() == []


async def test_a_warm_up_is_saved_at_its_end_before_anything_else_can_fail(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"validation": {"sets": [{"name": "sums", "path": "sums.parquet"}]}})
    warm_up(run)

    async def killed(step: int, version: Version) -> None:
        raise asyncio.CancelledError

    await run.checkpoints.finish()
    run.validate = killed
    with pytest.raises(asyncio.CancelledError):
        await run.run()
    assert ("save", "actor", 5) in run.events
    assert run.events.index(("save", "actor", 5)) < run.events.index(("push", 0))


async def test_a_run_that_continues_from_its_warm_up_validates_at_the_start_and_has_its_row(
    tmp_path: Path,
) -> None:
    sections = {
        "run": {"steps": 1},
        "validation": {"at_end": False, "sets": [{"name": "sums", "path": "sums.parquet"}]},
    }
    run = FakeRun(tmp_path, sections, validations=[0.5])
    warm_up(run)
    await run.run(resumed=True, unrecorded={"warmup/steps": 5.0})
    assert [key.step for key in run.trainers["actor"].weights] == [1]
    assert metrics_of(run.rows()[0]) == {"warmup/steps": 5.0, "val/sums/avg@1": 0.5}


async def test_models_without_a_folder_of_their_own_begin_with_the_warm_policy(tmp_path: Path) -> None:
    sections = {
        "run": {"steps": 1},
        "critic": {},
        "algorithm": {"advantage": "gae", "kl": {"where": "loss"}},
    }
    run = FakeRun(tmp_path, sections, models=("actor", "critic", "reference"))
    warm_up(run, export=run.config.folder / WARMUP_EXPORT)
    await run.run()
    exported = run.events.index(("export", "actor"))
    assert {event for event in run.events[exported:] if event[0] == "load"} == {
        ("load", "critic"),
        ("load", "reference"),
    }
    names = [event[0] for event in run.events[exported:]]
    assert names[:6] == ["export", "load", "load", "save", "save", "push"]
    later = FakeRun(tmp_path, sections, models=("actor", "critic", "reference"))
    await later.run(step=1)
    assert [event for event in later.events if event[0] == "load"] == [("load", "reference")]
