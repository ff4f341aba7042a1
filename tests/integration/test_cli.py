"""The real command: what it refuses, and with which words."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CONFIG = """
[run]
name = "toy"
steps = 2
dir = "{folder}/runs"

[model]
path = "{assets}/model"

[[data.train]]
path = "{assets}/train.parquet"

[rollout.sampling]
max_new_tokens = 4
"""


def atoll(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("atoll"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    run = tmp_path / "toy"
    run.mkdir()
    (run / "config.json").write_text('{"run": {"steps": 2}, "validation": {"best": null}}')
    reading, writing = os.pipe()
    os.close(reading)
    command = [Path(sys.executable).with_name("atoll"), "status", run]
    answer = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (1, "")


@pytest.fixture
def config(tmp_path: Path, assets: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(CONFIG.format(folder=tmp_path, assets=assets))
    return path


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from atoll.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'pydantic', 'numpy', 'rich'} & sys.modules.keys()))\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("usage: atoll")
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command", ["quickstart", "run", "status", "runs", "reload", "data", "export", "bench", "serve"]
)
def test_every_command_has_help(command: str) -> None:
    answer = atoll(command, "--help")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"usage: atoll {command}")


def test_dry_run_prints_the_resolved_config_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    answer = atoll("run", config, "--dry-run", "--set", "trainer.optimizer.learning_rate=3e-4")
    resolved = json.loads(answer.stdout)
    assert resolved["trainer"]["optimizer"]["learning_rate"] == 3e-4
    assert resolved["run"]["name"] == "toy"
    assert resolved["coordinator"]["samples_per_prompt"] == 8  # a default, made visible
    assert not (tmp_path / "runs").exists()


def test_an_unknown_key_names_the_nearest_known_one(config: Path) -> None:
    answer = atoll("run", config, "--dry-run", "--set", "trainer.optimizer.lerning_rate=1e-5")
    assert answer.returncode == 2
    assert "trainer.optimizer.lerning_rate: unknown key; did you mean learning_rate?" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    answer = atoll("run", tmp_path / "absent.toml")
    assert answer.returncode == 2
    assert f"{tmp_path / 'absent.toml'}: no such config file" in answer.stderr


@pytest.mark.parametrize("words", [["run"], ["run", "--dry-run"], ["doctor"]])
def test_what_is_wrong_is_said_before_anything_starts(
    config: Path, tmp_path: Path, assets: Path, words: list[str]
) -> None:
    """All of it, by each command that looks."""
    rows = pq.read_table(assets / "train.parquet").slice(0, 5).to_pylist()
    rows[3]["reward_model"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    (tmp_path / "model").mkdir()
    text = config.read_text().replace(f"{assets}/model", f"{tmp_path}/model")
    config.write_text(text.replace(f"{assets}/train", f"{tmp_path}/bad"))
    answer = atoll(words[0], config, *words[1:])
    if words == ["doctor"]:
        assert answer.returncode == 1
        assert answer.stdout.splitlines()[-1] == "2 missing"
        said = answer.stdout
    else:
        assert answer.returncode == 2
        assert answer.stdout == ""
        said = answer.stderr
    assert f"{tmp_path}/model is not a model folder: no config.json" in said
    assert (
        f"{tmp_path}/bad.parquet, row 3 (the first is 0): field answer or reward_model.ground_truth" in said
    )
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_names_port_and_setting(config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = atoll("run", config, "--set", f"coordinator.port={port}")
    assert answer.returncode == 2
    assert str(port) in answer.stderr
    assert "coordinator.port" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_run_folder_is_not_used_twice(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/toy"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    answer = atoll("run", config)
    assert answer.returncode == 2
    assert "--resume" in answer.stderr
    assert "run.name" in answer.stderr
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_resume_wants_a_run(config: Path) -> None:
    answer = atoll("run", config, "--resume")
    assert answer.returncode == 2
    assert "contains no run" in answer.stderr


def test_status_of_nothing(tmp_path: Path) -> None:
    answer = atoll("status", tmp_path)
    assert answer.returncode == 2
    assert f"{tmp_path} contains no run" in answer.stderr


def test_doctor_says_that_a_run_can_start(config: Path) -> None:
    answer = atoll("doctor", config)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.splitlines()[-1] == f"ready for: atoll run {config}"


def test_doctor_lists_what_it_checked() -> None:
    answer = atoll("doctor")
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.splitlines()[-1] == "ready for: atoll quickstart"
    checked = {line.split()[1] for line in answer.stdout.splitlines()}
    assert {"python", "grpcio", "torch", "megatron-core", "cores", "memory", "shared", "gpu"} <= checked
