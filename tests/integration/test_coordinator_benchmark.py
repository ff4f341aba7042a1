"""The coordinator's benchmark, at a load that any machine drives: it measures, and the run is a real one."""

import asyncio
from pathlib import Path

from atoll.runtime.store import run_embedded_server
from benchmarks.coordinator import Load, drive, prepared_run

LOAD = Load(replicas=4, reward_workers=2, rate=200.0, in_flight=200, tokens=16, group_size=4)


def test_the_coordinator_benchmark_runs_steps_and_says_what_each_part_costs(tmp_path: Path) -> None:
    config = prepared_run(LOAD, tmp_path)
    with run_embedded_server(config.folder / "store") as store:
        result = asyncio.run(drive(LOAD, 0.5, LOAD.steps_in_flight, config, store))
    samples_per_step = LOAD.prompts_per_step * LOAD.group_size
    assert LOAD.steps_in_flight * samples_per_step == LOAD.in_flight
    assert result["samples"] % samples_per_step == 0
    parts = result["coordinator_us_by_part"]
    assert sum(parts.values()) == result["coordinator_us"] >= result["decode_journal_grading_take_us"] > 0
    assert list((config.folder / "checkpoints").glob("step-*"))
