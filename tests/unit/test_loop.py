"""What the loop knows of the steps before it, where a run continues."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.config.schema import RunConfig
from services.coordinator.assembly import rows_before
from services.coordinator.control import Control
from services.coordinator.loop import Loop, Settings, Start
from services.runtime.telemetry import MetricsFile
from services.wire.types import Version


@pytest.mark.parametrize(("last", "ends"), [(0.5, False), (1.0, True)])
def test_the_window_of_the_target_goes_on_where_a_run_continues(
    tmp_path: Path, last: float, ends: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(0, {"val/sums/avg@1": 0.125})
        for step, score in enumerate((0.25, 0.75, last, 0.0), 1):
            file.write(step, {"critic/score/mean": score, "actor/grad_norm": float("nan")})
    MetricsFile(path, last_step=3)  # the checkpoint's
    config = RunConfig.model_validate(
        {
            "run": {"name": "toy", "dir": tmp_path, "steps": 9, "target_reward": 0.7, "target_window": 2},
            "model": {"path": tmp_path},
            "data": {"train": [{"path": tmp_path / "rows.jsonl"}]},
            "reward": {"graders": [{"name": "exact_match"}]},
        }
    )
    parts = SimpleNamespace(control=Control(trains=True))
    rows = rows_before(path)
    settings = Settings(config.run, config.validation, config.checkpoint, config.guards)
    start = Start(Version("a3f0", 3), 3, rows=rows, resumed=True)
    loop = Loop(settings, parts, start, time.monotonic)  # type: ignore[arg-type]
    assert rows[0] == {"val/sums/avg@1": 0.125}
    assert loop._scores == [0.25, 0.75, last]
    assert loop._ends() is ends  # the mean of the last two is 0.625, or 0.875
