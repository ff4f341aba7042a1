"""A run that begins at another one's checkpoint, and what a resume says of changed settings."""

import json
from pathlib import Path

import pytest

from atoll.cli.launch.fork import fork, parse_fork
from atoll.cli.main import main
from atoll.cli.run import show_changes
from atoll.config.load import validate
from atoll.coordinator.algorithm.algorithm import AlgorithmState
from atoll.coordinator.journal.checkpoints import BestValidation, Checkpoints, CoordinatorState
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import load_metrics
from atoll.wire.types import CheckpointWrite, Version
from tests.builders import write_run


class Model:
    async def save_checkpoint(self, path: Path) -> None:
        path.mkdir()  # noqa: ASYNC240
        (path / "weights").write_bytes(b"weights")

    async def wait_checkpoint(self, path: Path) -> CheckpointWrite:
        return CheckpointWrite(7, 0.0)


class Journal:
    async def write(self, path: Path) -> None:
        path.write_bytes(b"journal")  # noqa: ASYNC240


async def make_source(folder: Path, *steps: int, best: int | None = None) -> Path:
    """A run with a checkpoint of each of `steps`, the best of which is that of `best`."""
    run = write_run(folder, *(0.25 for _ in range(max(steps))))
    (run / "ledger.jsonl").write_text("the ledger\n")
    (run / "warm").mkdir()
    (run / "warm" / "model.safetensors").write_bytes(b"warm")
    checkpoints = Checkpoints(run / "checkpoints", keep=len(steps))

    async def committed(path: Path) -> None: ...

    for step in steps:
        kept = BestValidation(best, 0.5) if best is not None and best <= step else None
        state = CoordinatorState(step, Version("a", step), None, kept, AlgorithmState(), seconds=step * 10.0)
        await checkpoints.begin(state, Journal(), {"actor": Model()}, committed)
        await checkpoints.finish()
    return run


async def test_a_fork_is_the_run_as_it_was_at_the_step(tmp_path: Path) -> None:
    source = await make_source(tmp_path / "a", 2, 4, 6, best=2)
    copy = tmp_path / "b" / "toy"
    copy.mkdir(parents=True)
    assert fork(source, 4, copy) == 4
    checkpoints = Checkpoints(copy / "checkpoints", keep=1)
    assert checkpoints.steps() == [2, 4]  # the best one, too
    weights = checkpoints.path(4) / "actor" / "weights"
    assert weights.read_bytes() == b"weights"
    assert weights.samefile(source / "checkpoints/step-000004/actor/weights")  # takes no space
    assert checkpoints.load(4)[0].seconds == 40.0
    assert load_metrics(copy) == load_metrics(source)  # the coordinator drops rows 5 and 6
    assert not (copy / "metrics.jsonl").samefile(source / "metrics.jsonl")  # which both continue
    assert (copy / "ledger.jsonl").read_text() == "the ledger\n"
    assert (copy / "warm" / "model.safetensors").read_bytes() == b"warm"
    assert fork(source, None, copy) == 6  # in place of a start that failed
    assert checkpoints.steps() == [2, 6]


async def test_a_fork_needs_the_checkpoint(tmp_path: Path) -> None:
    source = await make_source(tmp_path, 2)
    with pytest.raises(UserError, match="has no checkpoint of step 3; it has: 2"):
        fork(source, 3, tmp_path / "b")
    with pytest.raises(UserError, match="nothing contains no run"):
        fork(tmp_path / "nothing", 3, tmp_path / "b")


def test_a_fork_names_a_run_and_perhaps_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"))
    assert parse_fork("toy") == (Path("runs/toy"), None)
    assert parse_fork("toy@100") == (Path("runs/toy"), 100)
    with pytest.raises(UserError, match="expected RUN or RUN@STEP"):
        parse_fork("toy@last")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "3"], "--step needs --resume"),
        (["--resume", "--fork-from", "toy"], "give one of them"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = tmp_path / "toy.toml"
    file.write_text(
        f'[run]\nname = "toy"\nsteps = 1\ndir = "{tmp_path}"\n[model]\npath = "m"\n'
        '[data]\ntrain = [{ path = "x.jsonl" }]\n'
    )
    assert main(["run", str(file), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_resume_says_which_settings_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    tree = json.loads((folder / "config.json").read_text())
    show_changes(folder, validate(tree, "same", is_resolved=True))
    assert capsys.readouterr().out == ""
    tree["run"] |= {"name": "fork", "steps": 20}
    tree["model"]["path"] = "other"
    show_changes(folder, validate(tree, "changed", is_resolved=True))
    assert capsys.readouterr().out.splitlines() == [
        "settings that differ from the last start:",
        '  model.path: "model" -> "other" (weights come from the checkpoint)',
        "  run.steps: 10 -> 20",
    ]
