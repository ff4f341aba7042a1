"""The loop on a trainer that only counts: what happens in which order, what ends it, what it leaves."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.control import RunState
from atoll.coordinator.data.conversations import SupervisedSequence
from atoll.coordinator.data.datasets import SupervisedSource
from atoll.coordinator.journal.checkpoints import BestValidation
from atoll.coordinator.rollouts.group_sources import ReplaySource
from atoll.coordinator.supervised import HeldOutSet, SupervisedSteps
from atoll.runtime.dump import dumps, last_dump, read_dump, write_dump
from atoll.runtime.errors import AtollError, DivergedError, ServiceUnavailableError, UserError
from atoll.runtime.telemetry import MetricsFile, rows_before
from atoll.wire.types import Group, StepKey, Trajectory, Version
from tests.builders import group, node, sample, sample_id
from tests.fakes import ACTOR_METRICS, FakeRun, ListSource, batch

SUMS = {"sets": [{"name": "sums", "path": "sums.parquet"}], "best": "sums/avg@1"}


async def test_a_version_is_published_before_it_is_validated_and_validated_before_it_is_saved(
    tmp_path: Path,
) -> None:
    sections = {
        "run": {"steps": 2},
        "validation": {**SUMS, "every": 1},
        "checkpoint": {"every": 1},
    }
    run = FakeRun(tmp_path, sections, validations=[0.0, 0.5, 0.25])
    await run.run()
    assert run.events == [
        ("push", 0),
        ("validate", 0),
        ("save", "actor", 0),
        ("update", "actor", 1),
        ("push", 1),
        ("validate", 1),
        ("save", "actor", 1),
        ("update", "actor", 2),
        ("push", 2),
        ("validate", 2),
        ("save", "actor", 2),
    ]
    assert run.journal.committed == [0, 1, 2]
    assert run.source.published_versions == [0, 1, 2]


async def test_the_summary_says_where_a_run_began_and_ended(tmp_path: Path) -> None:
    source = ListSource([batch(1, [0.0, 0.5]), batch(2, [0.5, 1.0])])
    sections = {
        "run": {"steps": 2, "target_window": 1},
        "validation": SUMS,
        "checkpoint": {"at_end": True},
    }
    seconds = iter([100.0, 130.0])
    run = FakeRun(
        tmp_path, sections, source=source, validations=[0.25, 0.75], clock=lambda: next(seconds, 130.0)
    )
    await run.run()
    assert run.summary() == {
        "run": "toy",
        "outcome": "finished",
        "reason": "",
        "steps": 2,
        "num_steps": 2,
        "seconds": 30.0,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "reward_window": 1,
        "target_reward": None,
        "validation_first": {"val/sums/avg@1": 0.25},
        "validation_last": {"val/sums/avg@1": 0.75},
        "best": {"step": 2, "value": 0.75},
        "checkpoint": str(run.checkpoints.path(2)),
        "hint": "",
    }
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    assert run.control.progress.state is RunState.FINISHED


async def test_a_guard_that_stops_leaves_the_diverged_weights_unpublished_and_unsaved(
    tmp_path: Path,
) -> None:
    sections = {"guards": {"max_ppo_kl": 0.1}, "checkpoint": {"every": 1, "at_end": True}}
    run = FakeRun(tmp_path, sections)
    run.trainers["actor"].metrics = lambda key: ACTOR_METRICS | {"actor/ppo_kl": 0.2 * (key.step == 2)}
    good = run.checkpoints.path(1)
    with pytest.raises(AtollError) as error:
        await run.run()
    assert str(error.value) == (
        "step 2: actor/ppo_kl is 0.2, beyond guards.max_ppo_kl = 0.1; "
        f"the last good checkpoint: step 1 in {good}"
    )
    assert run.checkpoints.steps() == [0, 1]
    summary = run.summary()
    assert (summary["outcome"], summary["reason"]) == ("stopped by a guard", str(error.value))
    assert (summary["steps"], summary["checkpoint"]) == (2, str(good))
    assert run.events[-1] == ("update", "actor", 2)
    assert run.source.published_versions == [0, 1]


async def test_weights_that_the_push_finds_diverged_are_not_saved(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"checkpoint": {"every": 1, "at_end": True}})
    push = run.push

    async def push_until_diverged(version: Version) -> Mapping[str, float]:
        if version.number == 2:
            raise DivergedError("training has diverged: not finite")
        return await push(version)

    run.push = push_until_diverged
    with pytest.raises(AtollError) as error:
        await run.run()
    assert str(error.value) == (
        "step 2: training has diverged: not finite; "
        f"the last good checkpoint: step 1 in {run.checkpoints.path(1)}"
    )
    assert run.checkpoints.steps() == [0, 1]


async def paused(run: FakeRun) -> None:
    """Waits until the run stands still."""
    progress = run.control.progress
    while progress.state is not RunState.PAUSED:
        progress = await run.control.follow(progress.revision, 30)


@pytest.mark.parametrize("answer", ["resume", "stop"])
async def test_a_guard_that_pauses_waits_for_an_answer_before_it_publishes(
    tmp_path: Path, answer: str
) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 2}, "guards": {"min_entropy": 0.5, "action": "pause"}})
    run.trainers["actor"].metrics = lambda key: ACTOR_METRICS | {"actor/entropy": float(key.step == 2)}
    running = asyncio.create_task(run.run())
    await paused(run)
    assert "actor/entropy is 0, beyond guards.min_entropy" in run.control.progress.error
    assert run.events[-1] == ("update", "actor", 1)
    if answer == "resume":
        await run.control.resume()
        await running
        assert ("push", 2) in run.events
    else:
        await run.control.stop()
        with pytest.raises(AtollError, match=r"guards\.min_entropy"):
            await running
        assert ("push", 1) not in run.events


async def test_a_paused_run_stands_between_two_steps_until_it_is_resumed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    await run.control.pause()
    running = asyncio.create_task(run.run())
    await paused(run)
    assert run.events == [("push", 0)]
    await run.control.resume()
    await running
    assert len(run.trainers["actor"].weights) == 3


async def test_a_paused_run_saves_at_once_when_it_is_asked_to(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    running = asyncio.create_task(run.run(step=1, seconds=5.0))
    await run.control.pause()
    await paused(run)
    for _ in range(2):  # the second one finds it there
        assert await run.control.request_checkpoint() == str(run.checkpoints.path(1))
    assert run.control.progress.state is RunState.PAUSED
    await run.control.stop()
    await running


async def test_a_run_that_a_guard_has_paused_refuses_to_save(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"guards": {"min_entropy": 2.0, "action": "pause"}})
    running = asyncio.create_task(run.run())
    await paused(run)
    with pytest.raises(UserError, match=r"a guard has paused the run: step 1: actor/entropy is 1"):
        await run.control.request_checkpoint()
    assert run.checkpoints.steps() == []
    await run.control.stop()
    with pytest.raises(AtollError):
        await running


async def test_checkpoints_come_by_time(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 5}, "checkpoint": {"every_minutes": 2.0}})
    run.clock = lambda: 50.0 * len(run.trainers["actor"].weights)
    await run.run()
    assert run.checkpoints.steps() == [3]


async def test_a_full_store_makes_a_checkpoint_due(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.journal.full = True
    await run.run()
    assert run.journal.committed == [1, 2, 3]


async def test_a_checkpoint_carries_what_a_resume_would_reset(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 2}, "checkpoint": {"every": 2}})
    run.clock = lambda: 10.0 * len(run.trainers["actor"].weights)
    await run.run(seconds=100.0)
    state, *_ = run.checkpoints.load(2)
    assert state.seconds == 120.0
    assert state.row["critic/score/mean"] == 0.5
    later = FakeRun(tmp_path, {"run": {"steps": 2}}, source=ListSource([]))
    await later.run(step=2, unrecorded=state.row, seconds=state.seconds)  # killed before it was recorded
    assert later.rows()[0]["critic/score/mean"] == 0.5
    assert later.summary()["seconds"] == 120.0
    assert later.summary()["reward_last"] == 0.5


class Failing(ListSource):
    """After its batches too much was dropped."""

    async def take(self, step: int, count: int, current: Version) -> list[Group]:
        if step > len(self._batches):
            raise AtollError("too many groups were dropped")
        return await super().take(step, count, current)


async def test_an_error_that_is_not_a_trainers_leaves_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, source=Failing([batch(1), batch(2)]))
    with pytest.raises(AtollError, match="too many groups were dropped"):
        await run.run()
    assert run.checkpoints.steps() == [2]
    assert run.journal.committed == [2]


FAILS_LATER = """
from atoll.coordinator.algorithm.estimates import Estimate

calls = []

def mine(trajectories):
    calls.append(trajectories)
    rewards = trajectories.rewards_T
    return Estimate(rewards, rewards) if len(calls) < 2 else 1 / 0
"""


async def test_an_advantage_that_fails_leaves_a_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_LATER)
    kl = {"where": "reward", "estimator": "k1", "coef": 1.0, "target": 0.01, "horizon": 10}
    sections = {"algorithm": {"advantage": f"{tmp_path / 'mine.py'}:mine", "kl": kl}}
    run = FakeRun(tmp_path, sections, models=("actor", "reference"))
    with pytest.raises(AtollError, match="failed: ZeroDivisionError: division by zero"):
        await run.run()
    state, *_ = run.checkpoints.load(1)
    # a KL divergence of 0 lowers it by 0.2 x 2 samples / 10, once: the failed step has not moved it
    assert state.algorithm.kl_coef == pytest.approx(0.96)
    assert state.row["actor/kl_coef"] == 1.0


@pytest.mark.parametrize(
    "error",
    [AtollError("the filter failed"), KeyError("bug"), ServiceUnavailableError("no replica for 600 s")],
)
async def test_generation_that_fails_beside_an_update_ends_the_run_after_it_and_saves(
    tmp_path: Path, error: Exception
) -> None:
    run = FakeRun(tmp_path, source=ListSource([batch(1)]))
    updating = asyncio.Event()

    async def fails() -> None:
        await updating.wait()
        raise ExceptionGroup("tasks", [error])

    def update(key: StepKey) -> Mapping[str, float]:
        updating.set()
        return ACTOR_METRICS

    run.background, run.trainers["actor"].metrics = fails, update
    with pytest.raises(Exception, match=str(error.args[0])) as raised:
        await run.run()
    assert not isinstance(raised.value, ServiceUnavailableError)  # which is taken for a lost trainer
    assert run.checkpoints.steps() == [1]


async def test_a_validation_that_fails_leaves_a_checkpoint_of_its_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"validation": {**SUMS, "at_start": False, "every": 1}}, validations=[])
    with pytest.raises(IndexError):
        await run.run()
    assert run.checkpoints.steps() == [1]
    assert run.checkpoints.load(1)[0].row["critic/score/mean"] == 0.5


async def test_a_trainer_that_is_lost_in_an_update_leaves_the_checkpoints_as_they_are(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"checkpoint": {"every": 1}})

    def lost(key: StepKey) -> dict[str, float]:
        if key.step == 2:
            raise ServiceUnavailableError("actor-0 is gone")
        return ACTOR_METRICS

    run.trainers["actor"].metrics = lost
    with pytest.raises(ServiceUnavailableError):
        await run.run()
    assert [event for event in run.events if event[0] == "save"] == [
        ("save", "actor", 0),
        ("save", "actor", 1),
    ]


async def test_turns_that_the_source_finds_too_old_are_not_trained_on(tmp_path: Path) -> None:
    class Weighing(ListSource):
        def oldest_trained(self, current: Version) -> int:
            return current.number - 1

    def turns(index: int, first: int) -> Trajectory:
        nodes = [node([3], versions=Version("l", first)), node([4], parent=0, versions=Version("l", 2))]
        return sample(sample_id(1, index), *nodes, score=float(index))

    run = FakeRun(tmp_path, {"run": {"steps": 3}}, source=Weighing([[group(turns(0, 0), turns(1, 1))]], 3))
    await run.run(step=2)
    (batch,) = run.trainers["actor"].batches.values()
    # the prompt and two samples of two turns; version 2 trains
    np.testing.assert_allclose(batch.loss_weights, np.array([0, 0, 1, 1, 1]) / 3)
    metrics = run.rows()[-1]
    assert (metrics["staleness/max"], metrics["staleness/masked_fraction"]) == (1, 0.25)


async def test_a_batch_that_the_trainer_refuses_costs_its_groups_and_its_step_number(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.trainers["actor"].refuses = lambda key: "NaN in it" if key.step == 2 else ""
    await run.run()
    ids = ["toy/0/2/0", "toy/0/2/1"]
    assert run.source.refusals == [(2, ids, "refused by the trainer: actor: NaN in it")]
    assert [key.step for key in run.trainers["actor"].weights] == [1, 3]
    assert [event[1] for event in run.events if event[0] == "push"] == [0, 1, 1, 2]
    assert [row["training/num_refused"] for row in run.rows()] == [0.0, 1.0, 0.0]


async def test_a_minibatch_that_the_trainer_refuses_costs_its_own_groups_alone(tmp_path: Path) -> None:
    sections = {"run": {"steps": 1}, "algorithm": {"num_minibatches": 2, "num_epochs": 2}}
    run = FakeRun(tmp_path, sections, source=ListSource([[batch(7)[0], batch(8)[0]]]))
    run.trainers["actor"].refuses = lambda key: "NaN in it" if key.minibatch == 1 else ""
    await run.run()
    assert [ids for _, ids, _ in run.source.refusals] == [["toy/0/8/0", "toy/0/8/1"]]
    assert [key.minibatch for key in run.trainers["actor"].weights] == [0, 2]
    assert ("push", 1) in run.events


async def test_a_batch_that_is_refused_before_the_update_costs_its_groups_too(tmp_path: Path) -> None:
    sections = {"run": {"steps": 2}, "algorithm": {"num_epochs": 2}}  # the trainer is asked for old logprobs
    run = FakeRun(tmp_path, sections)
    answers = iter(["a token beyond the vocabulary", ""])

    def logprob() -> float:
        if reason := next(answers):
            raise UserError(reason)
        return -1.0

    run.trainers["actor"].logprob = logprob
    await run.run()
    [(step, ids, reason)] = run.source.refusals
    assert (step, len(ids)) == (1, 2)
    assert reason == "refused by the trainer: actor: a token beyond the vocabulary"
    assert [key.step for key in run.trainers["actor"].weights] == [2, 2]


async def test_a_trainer_that_takes_nothing_ends_the_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.trainers["actor"].refuses = lambda key: "wrong shape" if key.step > 1 else ""
    with pytest.raises(AtollError, match="refused 2 steps in a row, the last time because actor: wrong"):
        await run.run()
    assert run.checkpoints.steps() == [3]  # a resume begins with another batch


async def test_a_run_that_is_stopped_while_it_waits_for_groups_saves_its_last_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"checkpoint": {"at_end": True}}, source=ListSource([batch(1)]))
    running = asyncio.create_task(run.run())
    progress = run.control.progress
    while progress.step < 1:
        progress = await run.control.follow(progress.revision, 30)
    await run.control.stop()
    await running
    assert run.checkpoints.steps() == [1]
    assert run.summary()["steps"] == 1


async def test_a_checkpoint_that_is_asked_for_comes_after_the_step_in_progress(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    asked = asyncio.create_task(run.control.request_checkpoint())
    await asyncio.sleep(0)
    await run.run()
    assert await asked == str(run.checkpoints.path(1))
    assert run.checkpoints.steps() == [1]


@pytest.mark.parametrize(("target", "last"), [(0.74, 3), (0.75, 4)])
async def test_a_run_ends_once_the_mean_reward_of_the_window_passes_its_target(
    tmp_path: Path, target: float, last: int
) -> None:
    scores = [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    source = ListSource([batch(step, pair) for step, pair in enumerate(scores, 1)])
    run = FakeRun(tmp_path, {"run": {"steps": 5, "target_reward": target, "target_window": 2}}, source=source)
    await run.run()
    assert run.summary()["steps"] == last


@pytest.mark.parametrize(("before", "steps"), [(0.5, 4), (1.0, 3)])
async def test_the_window_of_the_target_includes_the_steps_before_a_resume(
    tmp_path: Path, before: float, steps: int
) -> None:
    run = FakeRun(
        tmp_path,
        {"run": {"steps": 4, "target_reward": 0.7, "target_window": 2}},
        source=ListSource([batch(4)], first=4),
    )
    path = run.config.folder / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(0, {"val/sums/avg@1": 0.125})
        for step, score in enumerate((0.25, 0.75, before, 0.0), 1):
            file.write(step, {"critic/score/mean": score, "actor/grad_norm": float("nan")})
    MetricsFile(path, last_step=3)  # the checkpoint's
    rows = rows_before(path.parent)
    assert rows[0] == {"val/sums/avg@1": 0.125}
    await run.run(step=3, rows=list(rows.values()))
    assert run.summary()["steps"] == steps  # the mean of the last two is 0.625, or 0.875


async def test_a_resumed_run_neither_warms_up_nor_validates_at_its_start(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"validation": SUMS}, source=ListSource([batch(3)], first=3), validations=[0.5])
    await run.run(step=2, best=BestValidation(1, 0.75))
    assert run.events == [("push", 2), ("update", "actor", 3), ("push", 3), ("validate", 3)]
    assert run.summary()["best"] == {"step": 1, "value": 0.75}


async def test_the_best_checkpoint_is_saved_when_it_comes_and_kept(tmp_path: Path) -> None:
    sections = {
        "run": {"steps": 5},
        "validation": {**SUMS, "every": 1},
        "checkpoint": {"keep": 1, "every": 4},
    }
    run = FakeRun(tmp_path, sections, validations=[0.0, 0.25, 0.75, 0.5, 0.75, 0.5])
    await run.run()
    assert run.checkpoints.steps() == [2, 4]  # the first of equals, and the last that was due
    assert run.summary()["best"] == {"step": 2, "value": 0.75}


async def test_models_leave_the_device_once_their_part_of_the_step_is_over(tmp_path: Path) -> None:
    leaves = {"offload": True}
    sections = {
        "run": {"steps": 1},
        "trainer": leaves,
        "critic": leaves,
        "reference": leaves,
        "algorithm": {"advantage": "gae", "kl": {"where": "loss"}},
    }
    run = FakeRun(tmp_path, sections, models=("actor", "critic", "reference"))
    await run.run()
    of_step = run.events[run.events.index(("push", 0)) :]
    assert of_step[1:3] == [("offload", "actor"), ("offload", "reference")]  # the first version is out
    critic = [event for event in of_step if event[1] == "critic"]
    assert critic == [("update", "critic", 1), ("offload", "critic")]
    assert of_step[-3:] == [("push", 1), ("offload", "actor"), ("offload", "reference")]


async def test_models_that_take_turns_with_replicas_are_updated_one_at_a_time(tmp_path: Path) -> None:
    """The actor last, since it is published next."""
    leaves = {"offload": True}
    sections = {
        "run": {"steps": 1},
        "placement": {"mode": "colocated"},
        "trainer": leaves,
        "critic": leaves,
        "algorithm": {"advantage": "gae"},
    }
    run = FakeRun(tmp_path, sections, models=("actor", "critic"))
    await run.run()
    first = run.events.index(("update", "critic", 1))
    assert run.events[first : first + 3] == [
        ("update", "critic", 1),
        ("offload", "critic"),
        ("update", "actor", 1),
    ]


async def test_the_actor_and_its_version_wait_while_the_critic_warms_up(tmp_path: Path) -> None:
    sections = {"critic": {"warmup_steps": 2}, "algorithm": {"advantage": "gae"}}
    run = FakeRun(tmp_path, sections, models=("actor", "critic"))
    await run.run()
    assert [key.step for key in run.trainers["critic"].weights] == [1, 2, 3]
    assert [key.step for key in run.trainers["actor"].weights] == [3]
    assert [event[1] for event in run.events if event[0] == "push"] == [0, 0, 0, 1]


async def test_every_minibatch_of_every_epoch_has_a_key_of_its_own(tmp_path: Path) -> None:
    groups = [batch(1)[0], batch(2)[0]]
    sections = {"run": {"steps": 1}, "algorithm": {"num_minibatches": 2, "num_epochs": 2}}
    run = FakeRun(tmp_path, sections, source=ListSource([groups]))
    await run.run()
    keys = run.trainers["actor"].weights
    assert [(key.lineage, key.step, key.minibatch, key.role) for key in keys] == [
        ("a3f0", 1, number, "actor") for number in range(4)
    ]


async def test_rollout_only_dumps_its_groups_and_pushes_nothing(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 2, "mode": "rollout_only"},
        "coordinator": {"dump": True},
    }
    run = FakeRun(tmp_path, sections, models=())
    await run.run()
    written = [read_dump(path) for path in dumps(run.config.folder / "dumps")]
    assert [step for step, _ in written] == [1, 2]
    assert [str(groups[0].prompt.id) for _, groups in written] == ["toy/0/1", "toy/0/2"]
    assert run.journal.committed == [1, 2]  # a dump is the checkpoint of its step
    assert last_dump(run.config.folder / "dumps") == (2, Version("a3f0", 0))
    assert [row["critic/score/mean"] for row in run.rows()] == [0.5, 0.5]


async def test_a_dump_is_written_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[threading.Thread] = []

    def write(folder: Path, step: int, version: Version, groups: Sequence[Group]) -> Path:
        writers.append(threading.current_thread())
        return write_dump(folder, step, version, groups)

    monkeypatch.setattr("atoll.runtime.dump.write_dump", write)
    run = FakeRun(tmp_path, {"run": {"steps": 1}, "coordinator": {"dump": True}})
    await run.run()
    assert len(writers) == 1
    assert writers[0] is not threading.main_thread()


async def test_a_step_does_not_wait_for_its_dump_before_it_asks_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, in_time = threading.Event(), []

    def write(folder: Path, step: int, version: Version, groups: Sequence[Group]) -> Path:
        in_time.append(asked.wait(20))
        return write_dump(folder, step, version, groups)

    monkeypatch.setattr("atoll.runtime.dump.write_dump", write)
    sections = {"run": {"steps": 1}, "algorithm": {"kl": {"where": "loss"}}}
    run = FakeRun(tmp_path, sections, models=("actor", "reference"))

    def logprob() -> float:
        asked.set()
        return -1.0

    run.trainers["reference"].logprob = logprob
    await run.run()
    assert in_time == [True]
    assert len(dumps(run.config.folder / "dumps")) == 1


async def test_a_replay_trains_on_the_batches_of_a_dump(tmp_path: Path) -> None:
    first = FakeRun(tmp_path / "first", {"coordinator": {"dump": True}})
    await first.run()
    again = FakeRun(tmp_path / "again", source=ReplaySource(dumps(first.config.folder / "dumps")))
    await again.run()
    batches = [list(run.trainers["actor"].batches.values()) for run in (first, again)]
    for ours, theirs in zip(*batches, strict=True):
        assert ours.segments.token_ids.tolist() == theirs.segments.token_ids.tolist()
        assert ours.advantages.tolist() == theirs.advantages.tolist() != [0.0] * len(ours.advantages)


SEQUENCE = SupervisedSequence(np.arange(1, 6, dtype=np.int32), np.array([False, False, True, True, True]))


async def test_supervised_steps_train_on_rows_and_a_lower_loss_is_better(tmp_path: Path) -> None:
    sections = {
        "run": {"steps": 2, "mode": "supervised"},
        "validation": {"sets": [{"name": "held", "path": "held.parquet"}], "best": "held/nll", "every": 1},
    }
    run = FakeRun(tmp_path, sections)
    actor, rows = run.trainers["actor"], SupervisedSource([[SEQUENCE]], [1.0], seed=0, shuffle=True)
    run.steps = SupervisedSteps(rows, [HeldOutSet("held", [SEQUENCE])], actor, rows_per_step=2)
    losses = iter([1.0, 3.0, 2.0])
    actor.logprob = lambda: -next(losses)
    await run.run()
    assert [row["val/held/nll"] for row in run.rows()] == pytest.approx([1.0, 3.0, 2.0])
    assert run.summary()["best"]["step"] == 0
    assert [row["data/epoch"] for row in run.rows()[1:]] == [2.0, 4.0]  # of one row, two a step
    assert run.steps.cursor.drawn == (4,)
