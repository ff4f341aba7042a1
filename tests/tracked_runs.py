"""Folders of runs for trackers to follow."""

from collections.abc import Mapping
from pathlib import Path

from atoll.config.load import write_resolved
from atoll.config.schema import RunConfig
from atoll.runtime.telemetry import MetricsFile
from tests.builders import run_config

RUN_ID = "0123456789abcdef"


def make_run(folder: Path, **tracking: object) -> RunConfig:
    """The files of a run that has not finished a step."""
    config = run_config(run={"dir": folder}, tracking={"to": ["wandb"], **tracking})
    config.folder.mkdir()
    write_resolved(config, config.folder / "config.json")
    (config.folder / "run.id").write_text(RUN_ID)
    return config


def write_steps(
    config: RunConfig, values: Mapping[int, float], *names: str, times: int, after: int | None = None
) -> None:
    """As a coordinator that resumes after step `after`; None: one that begins. The metrics `names` have one
    value for each step; times ascend from `times`."""
    clock = iter(range(times, times + len(values)))
    with MetricsFile(config.folder / "metrics.jsonl", after, lambda: float(next(clock))) as file:
        for step, value in values.items():
            file.write(step, dict.fromkeys(names, value))
