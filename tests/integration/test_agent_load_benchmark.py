"""The benchmark of agent sessions, at a load that any machine drives: the run is a real one, nothing is lost,
and its figures are those between the first and the last round."""

import asyncio
from pathlib import Path

import pytest

from atoll.runtime.store import run_embedded_server
from benchmarks.agent_load import Load, Reading, account, drive, environment_port, prepared_run, report

LOAD = Load(sessions=16, rounds=3, turns=2, turn_s=0.01, tokens=8)


def test_every_session_of_the_benchmark_arrives_with_all_of_its_turns(tmp_path: Path) -> None:
    with environment_port() as port:
        config = prepared_run(LOAD, tmp_path, port)
        with run_embedded_server(config.folder / "store") as store:
            readings = asyncio.run(drive(LOAD, config, store))
    assert {"engine", "store", "atoll.coordinator", "atoll.gateway", "atoll.agents"} <= readings[
        -1
    ].rss.keys()
    assert account(LOAD, config) == {
        "samples_expected": 48,
        "samples_lost": 0,
        "turns_lost": 0,
        "sessions_repeated": 0.0,
        "audit": (),
    }


def test_the_first_and_the_last_round_are_not_measured() -> None:
    drawn = (0, 31, 32, 40, 60, 64, 65, 96)
    readings = [
        Reading(10.0 * n, drawn[n], {"engine": n / 10}, {"engine": n << 20}) for n in range(len(drawn))
    ]
    measured = report(LOAD, readings)
    assert (measured["turns"], measured["seconds"]) == (64 - 32, 50.0 - 20.0)
    assert measured["turns_per_s"] == pytest.approx(32 / 30)
    assert measured["cpu_ms_per_turn"]["engine"] == pytest.approx(300 / 32)
    assert measured["rss_mib_first_last_most"] == {"engine": [2, 5, 5]}
