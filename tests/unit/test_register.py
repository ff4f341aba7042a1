"""What `atoll register` and `atoll deregister` say before they reach a coordinator."""

from pathlib import Path

import pytest

from atoll.cli.main import main

JUDGE = ("reward", "judge", "http://127.0.0.1:1")


def test_a_run_that_does_not_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("register", *JUDGE, "--protocol", "http"), ("deregister", *JUDGE)):
        assert main([*words, "--run", str(tmp_path / "toy")]) == 2
        assert f"{tmp_path / 'toy'} is not running" in capsys.readouterr().err


def test_an_option_has_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("register", *JUDGE, "--protocol", "http", "--option", "preset", "--run", str(tmp_path))
    assert main(words) == 2
    assert "--option preset: expected KEY=VALUE" in capsys.readouterr().err


def test_the_coordinator_has_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deregister", *JUDGE, "--coordinator", "127.0.0.1:1"]) == 1
    assert "Coordinator.RemoveServer at 127.0.0.1:1: the connection failed" in capsys.readouterr().err


def test_without_a_run_it_is_the_only_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deregister", *JUDGE]) == 2
    assert "no active run in runs: name the run, or give --coordinator HOST:PORT" in capsys.readouterr().err
    for name in ("toy", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "operator.token").write_text("a-token")
    (tmp_path / "runs" / "toy" / "coordinator.address").write_text("127.0.0.1:1")
    assert main(["deregister", *JUDGE]) == 1
    assert "at 127.0.0.1:1: the connection failed" in capsys.readouterr().err
    (tmp_path / "runs" / "other" / "coordinator.address").write_text("127.0.0.1:2")
    assert main(["deregister", *JUDGE]) == 2
    assert "multiple runs are active (runs/other, runs/toy): name the run" in capsys.readouterr().err
