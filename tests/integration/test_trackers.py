"""What each tracker's package keeps of a run, read back by its own reader in its own environment, offline."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from atoll.runtime.dump import DUMPS, write_dump
from tests.builders import V0, group, node, sample, sample_id
from tests.tracked_runs import RUN_ID, make_run, write_steps

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tracking" / "bin" / "python"
SCORE, VALIDATION = "critic/score/mean", "val/toy/avg@4"
# Which values of repeated steps a package shows: the last, all, or the first.
LAST = [[1, 0.1], [2, 0.22], [3, 0.23]]
ALL = [[1, 0.1], [2, 0.2], [2, 0.22], [3, 0.23]]
KEPT = {"tensorboard": LAST, "wandb": ALL, "mlflow": ALL, "swanlab": ALL, "trackio": ALL}
KEEPS_TIMES = ("tensorboard", "wandb", "mlflow")
NAMES = {"tensorboard": [], "trackio": [f"toy-{RUN_ID[:8]}"]}  # how a run is recognized, if not by its id


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """The packages' own variables."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # a database needs more packages
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "http_proxy": "http://127.0.0.1:9",  # nobody there
        "https_proxy": "http://127.0.0.1:9",
    }


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab", "trackio"])
def test_what_is_sent_is_there(name: str, tmp_path: Path, offline: dict[str, str]) -> None:
    """Two steps; then the process starts again, and the run was resumed after the first."""
    config = make_run(tmp_path, project="sums", samples=1, every=3)
    answers = [group(sample(sample_id(7), node([3]), score=0.5, text="a | b\nc"))]
    write_dump(config.folder / DUMPS, 3, V0, answers)

    def run(*command: object) -> str:
        return subprocess.run(
            [PYTHON, *map(str, command)],
            env=offline,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def send() -> None:
        run("-m", "atoll.tracking", "--config", config.folder / "config.json", "--to", name)

    write_steps(config, {1: 0.1, 2: 0.2}, SCORE, VALIDATION, times=1000)
    send()
    write_steps(config, {2: 0.22, 3: 0.23}, SCORE, VALIDATION, times=2000, after=1)
    send()
    found = json.loads(run(ROOT / "tests" / "trackers" / "read_back.py", name, config.folder))
    for metric in (SCORE, VALIDATION):
        assert found[metric] == [[step, pytest.approx(value)] for step, value in KEPT[name]]
    if name in KEEPS_TIMES:
        times = {(1, 0.1): 1000.0, (2, 0.2): 1001.0, (2, 0.22): 2000.0, (3, 0.23): 2001.0}
        assert found["times"] == [times[step, value] for step, value in KEPT[name]]
    assert found["rate"] == config.trainer.optimizer.learning_rate
    assert set(found["ids"]) == set(NAMES.get(name, [RUN_ID]))
    assert "toy/0/7/0" in found["samples"]
    assert "1+1=" in found["samples"]
