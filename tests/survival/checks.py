"""What a run leaves: a whole history, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import psutil

from atoll.cli.audit import audit
from atoll.config.schema import RunConfig
from atoll.runtime.dump import dumps, read_dump
from atoll.wire.types import Group, Trajectory
from tests.survival.moments import SOCKET, moments_socket, temporary_folder


def rows(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


def last_step(config: RunConfig) -> int:
    return int(rows(config)[-1]["step"])


def trained(config: RunConfig) -> dict[int, list[Group]]:
    """Groups by step."""
    return dict(read_dump(path) for path in dumps(config.folder / "dumps"))


def samples(config: RunConfig) -> Iterator[tuple[int, Trajectory]]:
    """With the step that trained on each."""
    return ((step, s) for step, groups in trained(config).items() for group in groups for s in group.samples)


def check_history(config: RunConfig, steps: int) -> None:
    """A run of that many steps trained on each sample once, dropped none and repeated no step."""
    report = audit(config.folder)
    assert report.exit_code == 0, (report.wrong, report.unknown)
    assert {fate.kind for fate in report.fates.values()} <= {"trained", "pending"}, report.fates
    assert [row["step"] for row in rows(config) if row["step"]] == list(range(1, steps + 1))
    assert list(trained(config)) == list(range(1, steps + 1))
    repeated = list((config.folder / "dumps").glob("left-*"))  # dumped, and not in the restored checkpoint
    assert repeated == [], repeated
    size = config.coordinator.prompts_per_step * config.coordinator.samples_per_prompt
    ids = [str(sample.id) for _, sample in samples(config)]
    assert len(ids) == len(set(ids)) == steps * size


def ledger(config: RunConfig) -> Iterator[dict[str, Any]]:
    return map(json.loads, (config.folder / "ledger.jsonl").read_text().splitlines())


def generated_step(config: RunConfig) -> int:
    """The step whose samples an on-policy run is generating."""
    return 1 + max((event["step"] for event in ledger(config) if event["event"] == "consume"), default=0)


def check_saved(config: RunConfig, step: int) -> None:
    assert (config.folder / "checkpoints" / f"step-{step:06}").is_dir()


def check_no_work_after(config: RunConfig, replica: str, step: int) -> None:
    """The replica was told to leave while this step's samples were generated: it delayed no later step."""
    steps = [number for number, sample in samples(config) if sample.turns[0].origin.replica == replica]
    assert max(steps) <= step, (steps, step)


def check_generated_once(config: RunConfig) -> None:
    """Every sample was finished by its first attempt."""
    again = {str(sample.id): sample.attempt for _, sample in samples(config) if sample.attempt}
    assert again == {}


def check_nothing_left(config: RunConfig) -> None:
    """No process, and thereby no weights in shared memory, whose segments end with the processes that map
    them; no socket; no temporary file or folder; no address or token of the run."""
    _, alive = psutil.wait_procs(processes(config), timeout=60)  # whose parent has ended may be ending still
    assert alive == [], [process.cmdline() for process in alive]
    left_files = list(temporary_folder(config.run.dir).rglob("*"))
    assert left_files == [], left_files
    assert [path for path in config.folder.rglob("*") if path.is_socket()] == []
    names = {path.name for path in config.folder.iterdir()}
    assert names & {"coordinator.address", "coordinator.token", "operator.token", "prometheus.json"} == set()


def processes(config: RunConfig) -> list[psutil.Process]:
    """The services of this run, and what they have started."""
    return [process for process in psutil.process_iter() if _belongs(process, config)]


def _belongs(process: psutil.Process, config: RunConfig) -> bool:
    try:
        return process.environ().get(SOCKET) == str(moments_socket(config.run.dir))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
