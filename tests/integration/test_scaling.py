"""Services join and leave a run by command: every sample has one attempt."""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.audit import audit
from atoll.cli.drain import drain
from atoll.cli.launch.launcher import launch
from atoll.cli.scale import scale
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import dumps, read_dump
from atoll.wire.info import RunStatus
from tests.builders import arithmetic_run, run_config


async def until(client: CoordinatorClient, holds: Callable[[RunStatus], bool]) -> RunStatus:
    status = await client.status()
    while not holds(status):
        status = await client.status(status.revision)
    return status


def names(status: RunStatus) -> set[str]:
    return {entry.name for entry in status.services}


def attempts(config: RunConfig) -> set[int]:
    """Of all samples that were trained on, counted from 0."""
    files = dumps(config.folder / "dumps")
    return {s.attempt for path in files for group in read_dump(path)[1] for s in group.samples}


def test_replicas_come_and_go_and_no_sample_is_generated_twice(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(
        arithmetic_run(assets, tmp_path),
        run={"name": "scaled", "steps": 1000},
        rollout={"replicas": 2},
        reward={"services": 2},
        coordinator={"max_staleness": 1, "dump": "all"},
    )
    used: list[float] = []  # replicas with traffic
    where: dict[str, Any] = {"run": config.folder, "coordinator": None}

    async def scale_and_drain(client: CoordinatorClient) -> None:
        async def until_routed(number: float) -> RunStatus:
            status = await until(client, lambda s: s.metrics.get("rollout/num_routed") == number)
            used.append(number)
            return status

        await until_routed(2)
        await scale(Namespace(role="rollout", number=3, **where))
        await until_routed(3)
        await scale(Namespace(role="rollout", number=1, **where))
        await until(client, lambda s: names(s) == {"actor-0", "reward-0", "reward-1", "rollout-0"})
        await until_routed(1)
        assert await drain(Namespace(name="reward-1", **where)) == "reward-1 has left"
        left = await client.status()
        assert names(left) == {"actor-0", "reward-0", "rollout-0"}
        await until(client, lambda s: s.step >= left.step + 3)
        await client.stop_run()
        await asyncio.Event().wait()

    assert launch(config, scale_and_drain, resume=False)
    assert used == [2, 3, 1]
    assert audit(config.folder).exit_code == 0  # nothing is lost, or trained on twice
    assert attempts(config) == {0}
    logs = config.folder / "logs"
    for name in ("rollout-1", "rollout-2", "reward-1"):
        assert (logs / f"{name}.log").read_text().count("registered at") == 1  # it was not started again
    told = capsys.readouterr().out
    assert "the launcher starts rollout-2\n" in told
    assert "the launcher drains rollout-1, rollout-2\n" in told
