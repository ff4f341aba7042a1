import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import MetricsFile, StepTimer, load_metrics, metrics_of


def rows(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", clock=lambda: 1.7e9)
    metrics.write(1, {"critic/score/mean": 0.25, "timing_s/gen": 1.5})
    row = {"step": 1, "time": 1.7e9, "critic/score/mean": 0.25, "timing_s/gen": 1.5}
    assert rows(tmp_path / "metrics.jsonl") == [row]


def test_metrics_are_read_while_a_run_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = iter([10.0, 12.5])
    with MetricsFile(path, clock=lambda: next(times)) as metrics:
        metrics.write(0, {"val/sums/avg@1": 0.5})
        metrics.write(1, {"critic/score/mean": 0.25, "actor/grad_norm": math.nan})
    path.write_text(path.read_text() + '{"step": 2, "cri')  # a row that is being written
    first, second = load_metrics(tmp_path)
    assert first == {"step": 0, "time": 10.0, "val/sums/avg@1": 0.5}
    assert second == {"step": 1, "time": 12.5, "critic/score/mean": 0.25}
    assert metrics_of(second) == {"critic/score/mean": 0.25}


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no metrics.jsonl"):
        load_metrics(tmp_path)


def test_numbers_that_json_lacks_become_null_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", clock=lambda: 1.5) as metrics:
        metrics.write(3, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) == {
        "step": 3,
        "time": 1.5,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
    }
    assert [record.getMessage() for record in caplog.records] == [
        "step 3: loss is nan; written as null",
        "step 3: grad_norm is inf; written as null",
    ]


def test_a_resumed_run_has_one_row_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(6):
            metrics.write(step, {"lineage": 1.0})
    path.write_text(path.read_text() + '{"step": 6, "line')  # the process was killed in the middle of a row
    with MetricsFile(path, last_step=3) as metrics:
        metrics.write(4, {"lineage": 2.0})
    assert [(row["step"], row["lineage"]) for row in rows(path)] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    with MetricsFile(path, last_step=0):
        assert [metrics_of(row) | {"step": row["step"]} for row in rows(path)] == [
            {"step": 0, "lineage": 1.0}
        ]
    with MetricsFile(path):
        assert rows(path) == []


def test_a_file_that_cannot_be_cut_stays_whole(tmp_path: Path) -> None:
    """The disk is full: without a row, --resume would find no run here."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(2000):
            metrics.write(step, {"lineage": 1.0})
    before = path.read_text()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MetricsFile(path, last_step=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == before


def test_phases_add_up_and_may_nest() -> None:
    timer = StepTimer()
    with timer.phase("step"):
        for _ in range(2):
            with timer.phase("gen"):
                time.sleep(0.02)
        with pytest.raises(ValueError, match="x"), timer.phase("reward"):
            raise ValueError("x")  # a phase that fails counts too
    metrics = timer.metrics()
    assert set(metrics) == {"timing_s/step", "timing_s/gen", "timing_s/reward"}
    assert 0.04 <= metrics["timing_s/gen"] <= metrics["timing_s/step"]


def test_a_log_line_has_time_level_service_and_module() -> None:
    program = (
        "import logging; from atoll.runtime.telemetry import configure_logging\n"
        "configure_logging('rollout-1'); logging.getLogger('atoll.x').info('sample %s', 'toy/0/7/1')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    when, rest = done.stderr.split(" ", 1)
    assert time.strptime(when[:19], "%Y-%m-%dT%H:%M:%S")
    assert rest == "INFO rollout-1 atoll.x: sample toy/0/7/1\n"
