"""What trackers get of a run: every row once, whatever restarts in between."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from atoll.cli.launch.preflight import check_trackers
from atoll.config.errors import ConfigError
from atoll.config.schema import RunConfig
from atoll.coordinator.control import RunControl
from atoll.runtime.dump import DUMPS, write_dump
from atoll.runtime.errors import UserError
from atoll.tracking.__main__ import follow
from atoll.tracking.feed import Feed
from atoll.tracking.tracker import SampleRow, TrackedRun
from tests.builders import V0, group, node, sample, sample_id
from tests.coordinator_server import serve_coordinator
from tests.tokens import CALLER
from tests.tracked_runs import RUN_ID, make_run, write_steps


class Recorder:
    """A tracker that remembers what it is told. Raises for the step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.runs: list[TrackedRun] = []
        self.rows: list[tuple[int, float, Mapping[str, float]]] = []
        self.samples: dict[int, Sequence[SampleRow]] = {}
        self.finished = 0
        self.told = asyncio.Event()
        self._fails_at = fails_at

    def start(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the tracker is away")
        self.rows.append((step, time, metrics))
        self.told.set()

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.samples[step] = rows

    def finish(self) -> None:
        self.finished += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.rows]


def record_steps(config: RunConfig, *steps: int, times: int, after: int | None = None) -> None:
    write_steps(config, {step: step / 10 for step in steps}, "score", times=times, after=after)


def send(config: RunConfig, tracker: Recorder) -> Recorder:
    """One life of a tracker's process."""
    with closing(Feed(config, "wandb", tracker)) as feed:
        feed.start()
        feed.finish()
    return tracker


def test_a_tracker_gets_the_config_and_each_row_with_its_time(tmp_path: Path) -> None:
    config = make_run(tmp_path, project="sums")
    assert send(config, Recorder()).rows == []  # before the first step
    record_steps(config, 1, 2, times=100)
    tracker = send(config, Recorder())
    assert tracker.rows == [(1, 100, {"score": 0.1}), (2, 101, {"score": 0.2})]
    assert tracker.finished == 1
    (run,) = tracker.runs
    assert (run.project, run.name, run.id) == ("sums", "toy", RUN_ID)
    assert run.config == json.loads(config.model_dump_json())
    assert run.folder == tmp_path / "toy"


def test_a_tracker_that_starts_again_gets_what_is_new(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    record_steps(config, 1, 2, times=100)
    assert send(config, Recorder()).steps == [1, 2]
    record_steps(config, 3, times=102, after=2)
    with (config.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 103.0, "sco')  # is being written
    assert send(config, Recorder()).steps == [3]
    assert send(config, Recorder()).steps == []


def test_steps_that_a_resumed_run_repeats_are_sent_again(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    record_steps(config, 1, 2, 3, times=100)
    assert send(config, Recorder()).steps == [1, 2, 3]
    record_steps(config, 2, 3, 4, times=200, after=1)
    assert send(config, Recorder()).rows == [
        (2, 200, {"score": 0.2}),
        (3, 201, {"score": 0.3}),
        (4, 202, {"score": 0.4}),
    ]


def test_what_a_tracker_failed_to_take_is_sent_to_its_next_process(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    record_steps(config, 1, 2, 3, times=100)
    failing = Recorder(fails_at=2)
    with pytest.raises(ConnectionError):
        send(config, failing)
    assert (failing.steps, failing.finished) == ([1], 0)
    assert send(config, Recorder()).steps == [2, 3]


def test_samples_of_every_nth_step_are_sent_one_of_each_group_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_run(tmp_path, samples=3, every=2)
    for step in (1, 2):
        groups = [
            group(
                *(
                    sample(sample_id(prompt, index), node([3]), score=prompt + index / 10, text=f"{index}")
                    for index in range(2)
                )
            )
            for prompt in range(2)
        ]
        write_dump(config.folder / DUMPS, step, V0, groups)
    record_steps(config, 0, 1, 2, 3, 4, times=100)  # no dump of step 4, nor of the validation at step 0
    tracker = send(config, Recorder())
    assert tracker.steps == [0, 1, 2, 3, 4]
    assert tracker.samples == {
        2: [
            SampleRow("toy/0/0/0", "1+1=", "0", "2", 0.0),
            SampleRow("toy/0/1/0", "1+1=", "0", "2", 1.0),
            SampleRow("toy/0/0/1", "1+1=", "1", "2", 0.1),
        ]
    }
    assert [text[:20] for text in caplog.messages] == ["no samples of step 4"]


def test_only_one_process_feeds_a_tracker(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with closing(Feed(config, "wandb", Recorder())):
        with pytest.raises(UserError, match="another process is sending this run to wandb"):
            Feed(config, "wandb", Recorder())
        Feed(config, "mlflow", Recorder()).close()
    Feed(config, "wandb", Recorder()).close()


async def test_a_running_run_is_followed_until_the_process_is_told_to_stop(tmp_path: Path) -> None:
    config, tracker, control = make_run(tmp_path), Recorder(), RunControl(trains=True)
    coordinator = await serve_coordinator(control)
    with closing(Feed(config, "wandb", tracker)) as feed:
        following = asyncio.create_task(follow(coordinator.address, CALLER, feed))
        for step in (1, 2):
            record_steps(config, step, times=100 + step, after=step - 1)
            await control.report(step=step)
            await asyncio.wait_for(tracker.told.wait(), 30)
            tracker.told.clear()
        record_steps(config, 3, times=103, after=2)  # and nobody says so
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(following, 30)
    await coordinator.stop(0)
    assert (tracker.steps, tracker.finished) == ([1, 2, 3], 1)


def test_a_missing_package_is_told_with_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (tmp_path / "wandb").mkdir()  # as wandb itself leaves one where it is started
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(UserError) as raised:
        check_trackers(("wandb", "mlflow"), bare)
    assert str(raised.value) == (
        f"{bare} cannot import wandb mlflow: pip install 'atoll[wandb,mlflow]' there, or set tracking.python"
    )
    for name in ("wandb", "mlflow"):
        (tmp_path / f"{name}.py").touch()
    assert check_trackers(("wandb", "mlflow"), bare) == f"{bare} has wandb, mlflow"


def test_a_tracker_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names a tracker twice"):
        make_run(tmp_path, to=["wandb", "mlflow", "wandb"])
