"""`atoll config`: what it writes, and when it leaves a file alone or refuses to touch it."""

import json
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.config.load import read_resolved
from atoll.config.placement import replica_environment, trainer_environment
from tests import nvidia_smi


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "toy.toml"
    path.write_text(
        '[run]\nname = "toy"\nsteps = 4\n[model]\npath = "model"\n[[data.train]]\npath = "rows.jsonl"\n'
        '[reward]\ngraders = [{ name = "exact_match" }]\n'
    )
    return path


def test_a_printed_config_is_resolved(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(file), "--set", "run.steps=5"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["run"]["steps"], config["trainer"]["device"], config["trainer"]["dtype"]) == (
        5,
        "cpu",
        "float32",
    )
    assert not Path("runs").exists()


def test_the_second_start_of_a_run_takes_what_has_changed_and_leaves_an_equal_file_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path("runs/toy/config.json")
    assert main(["config", str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out == "wrote runs/toy/config.json\n"
    assert out.stat().st_mode & 0o777 == 0o600
    before = out.stat()
    assert main(["config", str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out == "runs/toy/config.json is up to date\n"
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert main(["config", str(file), "--out", str(out), "--set", "run.steps=9"]) == 0
    assert "  run.steps: 4 -> 9\n" in capsys.readouterr().out
    assert read_resolved(out).run.steps == 9


def test_the_config_of_another_run_is_not_replaced(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("config.json")
    assert main(["config", str(file), "--out", str(out)]) == 0
    assert main(["config", str(file), "--out", str(out), "--set", "run.name=other"]) == 2
    assert "config.json is the config of run 'toy', expected 'other': write to" in capsys.readouterr().err
    assert read_resolved(out).run.name == "toy"


@pytest.mark.parametrize("here", [0, 4])
def test_a_run_that_asks_for_gpus_is_resolved_for_them_with_or_without_gpus_here(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, here)
    settings = [
        "trainer.device=cuda",
        "trainer.parallel.data=2",
        "rollout.engine=sglang",
        "rollout.replicas=2",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["config", str(file), "--out", "config.json", *sets]) == 0
    config = read_resolved(Path("config.json"))
    assert config.placement.gpus.model_dump(exclude_defaults=True) == {"actor": "0-1", "rollout": ("2", "3")}
    assert (config.rollout.device, config.trainer.dtype, config.weights.transport) == (
        "cuda",
        "bfloat16",
        "nccl",
    )
    assert trainer_environment(config, "actor", 1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert replica_environment(config, "rollout-3f2a91") == {}  # a container's own GPUs


def test_a_run_that_does_not_ask_for_gpus_computes_on_the_cpu_where_there_are_none(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 0)
    assert main(["config", str(file), "--set", "rollout.engine=sglang"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"]["device"] == "cpu"
