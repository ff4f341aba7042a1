"""What `atoll runs`, `stop`, `rm` and `status` make of runs' folders."""

import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.display.summary import clock, describe_summary
from atoll.cli.launch.active_runs import run_folder
from atoll.cli.main import main
from atoll.cli.runs import as_table, best_validation, overview, read_size, show_age, show_bytes
from atoll.coordinator.summary import Outcome
from tests.builders import write_run


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.FINISHED, "finished"),
        (Outcome.TARGET_REACHED, "finished"),
        (Outcome.INTERRUPTED, "interrupted"),
        (Outcome.STOPPED_BY_GUARD, "failed"),
        (Outcome.FAILED, "failed"),
        (None, "crashed"),
    ],
)
def test_a_run_that_has_ended_is_listed(tmp_path: Path, outcome: Outcome | None, state: str) -> None:
    folder = write_run(tmp_path, 0.25, 0.75, 0.5, outcome=outcome)
    found = overview(folder)
    assert (found.state, found.step, found.num_steps) == (state, 3, 10)
    assert (found.reward, found.best) == (0.5, 0.75)  # the best of 0.75, 0.25, 0.5
    assert found.num_bytes == sum(path.stat().st_size for path in folder.iterdir()) == read_size(folder)


def test_a_run_is_running_while_its_coordinator_answers(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        (folder / "coordinator.address").write_text(f"127.0.0.1:{coordinator.getsockname()[1]}")
        found = overview(folder)
        assert (found.state, found.step, found.reward, found.best) == ("running", 0, None, None)
    assert overview(folder).state == "crashed"  # it has left its address


def test_of_a_loss_the_lowest_is_the_best() -> None:
    rows = [{"val/sums/nll": value} for value in (3.0, 1.0, 2.0)]
    assert best_validation({"validation": {"best": "sums/nll"}}, rows) == 1.0
    assert best_validation({"validation": {"best": None}}, rows) is None


def test_the_list_fits_eighty_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 0.25, 0.5, outcome=Outcome.INTERRUPTED)
    assert main(["runs", str(tmp_path)]) == 0
    titles, row = capsys.readouterr().out.splitlines()
    assert titles.split() == ["run", "state", "step", "reward", "best", "changed", "size"]
    assert row.split()[:6] == ["toy", "interrupted", "2/10", "0.500", "0.750", "now"]
    assert as_table([], 0.0).columns[0].overflow == "fold"


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no runs" in capsys.readouterr().err


def test_sizes_and_ages_are_short() -> None:
    assert [show_bytes(n) for n in (7, 1500, 2.5e6, 16e9, 3e12)] == [
        "7 B",
        "1.5 kB",
        "2.5 MB",
        "16 GB",
        "3 TB",
    ]
    assert [show_age(s) for s in (5, 120, 7200, 3 * 86400)] == ["now", "2 min ago", "2 h ago", "3 d ago"]
    assert [clock(s) for s in (5.9, 125, 7322)] == ["0:05", "2:05", "2:02:02"]


def test_a_run_is_named_by_its_name_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"))
    (tmp_path / "toy").mkdir()  # no run
    assert run_folder("toy") == run_folder("runs/toy") == Path("runs/toy")
    assert run_folder("other") == Path("other")
    write_run(tmp_path)
    assert run_folder("toy") == Path("toy")


def test_rm_deletes_what_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, 0.5)
    assert main(["rm", str(folder), "--yes"]) == 0
    assert not folder.exists()
    assert capsys.readouterr().out.startswith("deleted ")


@pytest.mark.parametrize(("answer", "is_left"), [("n", True), ("", True), ("y", False)])
def test_rm_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_left: bool) -> None:
    folder = write_run(tmp_path, 0.5)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["rm", str(folder)]) == int(is_left)
    assert folder.exists() == is_left


def test_rm_deletes_nothing_if_one_is_running_or_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, running = write_run(tmp_path / "a", 0.5), write_run(tmp_path / "b", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        (running / "coordinator.address").write_text(f"127.0.0.1:{coordinator.getsockname()[1]}")
        assert main(["rm", "--yes", str(ended), str(running)]) == 2
    assert f"{running} is running: stop it first" in capsys.readouterr().err
    assert main(["rm", "--yes", str(ended), str(tmp_path)]) == 2
    assert f"{tmp_path} contains no run" in capsys.readouterr().err
    assert ended.exists()


def test_stop_of_a_run_that_is_not_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(write_run(tmp_path, 0.5))]) == 2
    assert "is not running" in capsys.readouterr().err


def test_status_without_a_run_wants_exactly_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "no active run in runs" in capsys.readouterr().err


def test_a_mistyped_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rnu", "x.toml"])
    assert ended.value.code == 2
    assert "unknown command 'rnu'; did you mean run?" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "atoll 0.1.0\n"


SUMMARY: dict[str, Any] = {
    "run": "toy",
    "outcome": "finished",
    "reason": "",
    "steps": 43,
    "num_steps": 300,
    "seconds": 125.0,
    "reward_first": 0.25,
    "reward_last": 0.75,
    "reward_window": 10,
    "target_reward": 0.7,
    "validation_first": {"val/sums/avg@1": 0.25, "val/sums/dropped": 0.0},
    "validation_last": {"val/sums/avg@1": 0.5, "val/sums/dropped": 0.0},
    "best": {"step": 40, "value": 0.5},
    "checkpoint": "runs/toy/checkpoints/step-000043",
    "hint": "",
}


def test_a_summary_says_what_came_out_and_what_to_type_next() -> None:
    assert describe_summary(SUMMARY, Path("runs/toy")).splitlines() == [
        "toy: finished 43 steps in 2:05",
        "  reward      0.250 -> 0.750 (means of the first and last 10 steps)",
        "  sums/avg@1  0.250 -> 0.500",
        "  best        0.500 at step 40",
        "  checkpoint  runs/toy/checkpoints/step-000043",
        "  metrics     runs/toy/metrics.jsonl",
        "  next        atoll samples toy; atoll plot toy; atoll export toy --out FOLDER",
    ]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"outcome": "target reached"},
            ["toy: reached run.target_reward = 0.7 after 43 of 300 steps in 2:05"],
        ),
        (
            {"outcome": "interrupted"},
            ["toy: interrupted after step 43 of 300 in 2:05", "  continue    atoll run toy.toml --resume"],
        ),
        (
            {"outcome": "failed", "reason": "the disk is full", "seconds": None},
            [
                "toy: failed after step 43 of 300: the disk is full",
                "  continue    atoll run toy.toml --resume",
            ],
        ),
        (
            {"outcome": "stopped by a guard", "reason": "actor/ppo_kl is 0.2"},
            ["toy: stopped by a guard after step 43 of 300 in 2:05: actor/ppo_kl is 0.2"],
        ),
        ({"reward_window": 0}, ["toy: finished 43 steps in 2:05", "  reward      0.750 (one step)"]),
    ],
)
def test_a_summary_begins_with_how_the_run_ended(changes: dict[str, Any], lines: list[str]) -> None:
    text = describe_summary({**SUMMARY, **changes}, Path("runs/toy"), "atoll run toy.toml --resume")
    assert text.splitlines()[: len(lines)] == lines


def test_a_broken_summary_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, 0.5)
    for text, problem in (
        ("{", ": not valid JSON"),
        ('{"run": "toy"}', " is not a run's summary"),
        ("[]", " is not a run's summary"),
    ):
        (folder / "summary.json").write_text(text)
        assert main(["status", str(folder)]) == 2
        assert f"{folder}/summary.json{problem}" in capsys.readouterr().err
