"""A run of real processes is killed twice, with a checkpoint between: one whole history is left of it."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from atoll.cli.audit import audit
from atoll.cli.launch.launcher import launch
from atoll.config.schema import RunConfig
from atoll.coordinator.run_data import read_data
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import read_dump
from atoll.runtime.errors import AtollError
from atoll.wire.types import Group, GroupId
from tests.builders import arithmetic_run, run_config

pytestmark = pytest.mark.long

PROMPTS = SAMPLES = 4
LOST_STEPS = 8  # between the checkpoint and the first death
REPEATED_STEPS = 4  # before the next checkpoint: more than the bound on staleness, fewer than were lost
MORE_STEPS = 3  # after all that was dumped before


def make(assets: Path, folder: Path, steps: int) -> RunConfig:
    """Asynchronous, with no checkpoint but those asked for."""
    sections = {
        "run": {"name": "twice", "steps": steps},
        "coordinator": {"max_staleness": 1},
        "trainer": {"max_restarts": 0},
        "warmup": {"steps": 10, "rows_per_step": 16, "source": {"path": assets / "warmup.parquet"}},
        "checkpoint": {"every": 1000},
    }
    return run_config(arithmetic_run(assets, folder), sections)


class Killer:
    """Asks for a checkpoint some steps after the start, waits for some steps more, and kills a process."""

    def __init__(self, word: str, before: int, after: int) -> None:
        """`word`: of its command line."""
        self._word, self._before, self._after = word, before, after
        self.saved = ""

    async def __call__(self, client: CoordinatorClient) -> None:
        first = await self._reach(client, 0)
        await self._reach(client, first + self._before)
        self.saved = await client.checkpoint()
        await self._reach(client, int(self.saved.rpartition("-")[2]) + self._after)
        next(p for p in psutil.Process().children() if self._word in p.cmdline()).kill()
        await asyncio.Event().wait()

    async def _reach(self, client: CoordinatorClient, step: int) -> int:
        status = await client.status()
        while status.state != "training" or status.step < step:
            status = await client.status(status.revision)
        return status.step


async def watch(client: CoordinatorClient) -> None:
    await asyncio.Event().wait()


def dumps(config: RunConfig) -> dict[int, list[Group]]:
    """Of the steps on the path to the run's end."""
    return dict(read_dump(path) for path in sorted((config.folder / "dumps").glob("step-*.pb")))


def drawn(config: RunConfig, count: int) -> list[GroupId]:
    prompts = read_data(config).prompts
    assert prompts is not None
    return [prompt.id for prompt in prompts.draw(count)]


def test_killed_twice_with_a_checkpoint_between_every_prompt_is_trained_on_once(
    assets: Path, tmp_path: Path
) -> None:
    endless = make(assets, tmp_path, 1000)
    for resume, killer in (
        (False, Killer("atoll.coordinator", before=1, after=LOST_STEPS)),
        (True, Killer("actor-0", before=REPEATED_STEPS, after=1)),
    ):
        with pytest.raises(AtollError, match="SIGKILL"):
            launch(endless, killer, resume=resume)
        assert Path(killer.saved).is_dir()
    steps = max(dumps(endless)) + MORE_STEPS
    assert launch(make(assets, tmp_path, steps), watch, resume=True)

    report = audit(endless.folder)
    assert report.exit_code == 0, (report.wrong, report.unknown)
    trained = dumps(endless)
    assert list(trained) == list(range(1, steps + 1))
    groups = [group for batch in trained.values() for group in batch]
    assert all([s.id.index for s in group.samples] == list(range(SAMPLES)) for group in groups)
    assert {name: fate.step for name, fate in report.fates.items()} == {
        str(sample.id).partition("/")[2]: step
        for step, batch in trained.items()
        for group in batch
        for sample in group.samples
    }
    assert Counter(group.prompt.id for group in groups) == Counter(drawn(endless, PROMPTS * steps))
