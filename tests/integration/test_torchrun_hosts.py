"""Ranks that torchrun starts: on several hosts they take the GPUs that the file names for them; in a
container, all of them end with torchrun or with one of them."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.config.load import load, write_resolved
from atoll.config.schema import ParallelConfig
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.gpus import resolve_here
from atoll.runtime.ports import reserve_port
from tests import nvidia_smi
from tests.builders import run_config
from tests.tokens import CALLER
from tests.trainer_fleet import update

# What atoll.trainer does before it imports torch
RANK = """
import os, sys
from pathlib import Path
from atoll.config.load import read_resolved, trainer_rank
from atoll.runtime.gpus import take_gpu
folder, rank = Path(sys.argv[1]), trainer_rank()
take_gpu(read_resolved(folder / "config.json"), "actor", rank)
(folder / f"rank-{rank}").write_text(f"{os.environ['GROUP_RANK']}:{os.environ['CUDA_VISIBLE_DEVICES']}")
"""
TOML = """
[run]
name = "toy"
steps = 1
[model]
path = "model"
[[data.train]]
path = "train.jsonl"
[coordinator]
host = "127.0.0.2"
[placement.gpus]
actor = "5,4,node1:2-3"
rollout = ["node1:0"]
[rollout]
engine = "sglang"
[trainer.parallel]
data = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the config of a run whose actor has two ranks on each of two hosts."""
    nvidia_smi.install(monkeypatch, tmp_path, 8)
    (tmp_path / "run.toml").write_text(TOML)
    write_resolved(resolve_here(load(tmp_path / "run.toml")), tmp_path / "config.json")
    return tmp_path


def test_two_torchrun_hosts_get_the_gpus_that_the_file_names(folder: Path) -> None:
    (folder / "rank.py").write_text(RANK)
    with reserve_port() as port:
        hosts = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(number), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
                    *("--master-port", str(port), folder / "rank.py", folder),
                ]
            )
            for number in range(2)
        ]
        assert [host.wait(120) for host in hosts] == [0, 0]
    assert [(folder / f"rank-{rank}").read_text() for rank in range(4)] == ["0:5", "0:4", "1:2", "1:3"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            {"GROUP_RANK": "1", "LOCAL_RANK": "0"},
            r'trainer.device = "cuda", but PyTorch .* cannot use a GPU \(CUDA_VISIBLE_DEVICES = 2\)',
        ),
        (
            {"GROUP_RANK": "0", "LOCAL_RANK": "2"},
            "trainer: torchrun starts rank 2 as local rank 2 of host 0, expected local rank 0 of host 1",
        ),
    ],
    ids=["no GPU for torch", "another layout"],
)
def test_a_rank_never_computes_elsewhere(folder: Path, place: dict[str, str], message: str) -> None:
    """On the CPU, say, or on the GPU of another rank."""
    answer = subprocess.run(
        [sys.executable, "-m", "atoll.trainer", "--config", folder / "config.json"],
        env=os.environ | {"RANK": "2", "WORLD_SIZE": "4"} | place,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 1
    assert re.search(message, answer.stderr.splitlines()[-1])


@pytest.fixture
def container(tmp_path: Path, tiny_qwen2: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """torchrun with all ranks of an actor, as a container starts it, and the actor's address."""
    parallel = {"parallel": ParallelConfig(data=2)}
    config = run_config(run={"dir": tmp_path, "name": "toy"}, model={"path": tiny_qwen2}, trainer=parallel)
    write_resolved(config, tmp_path / "config.json")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    trainer = ("-m", "atoll.trainer", "--config", str(tmp_path / "config.json"))
    with subprocess.Popen([*torchrun, *trainer], stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started, log_until(started, r"serves actor at (\S+)")
        finally:
            for process in psutil.Process(started.pid).children() if started.poll() is None else []:
                process.kill()
            started.kill()


def log_until(process: "subprocess.Popen[str]", pattern: str) -> str:
    """What `pattern` finds in the next lines of its log."""
    assert process.stderr
    read = list[str]()
    for line in process.stderr:
        read.append(line)
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError("".join(read))


def test_ranks_serve_until_their_leader_ends_whatever_torchrun_signals_them(
    container: tuple["subprocess.Popen[str]", str],
) -> None:
    """torchrun passes SIGTERM on to all ranks at once, but the leader may have an update to finish."""
    started, address = container
    leader, follower = sorted(psutil.Process(started.pid).children(), key=rank_of)

    async def update_after_signal() -> None:
        client = TrainerClient(address, CALLER, timeout_s=60)
        follower.terminate()
        await update(client, 0)
        await client.close()

    asyncio.run(update_after_signal())
    started.terminate()
    assert started.stderr
    log = started.stderr.read()
    assert started.wait() == 1  # SignalException
    assert "actor-0 atoll.runtime.process: stops" in log
    assert not psutil.pid_exists(leader.pid)
    assert not psutil.pid_exists(follower.pid)


def rank_of(process: psutil.Process) -> int:
    return int(process.environ()["RANK"])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_container_ends_with_an_error_once_a_rank_has_died(
    rank: int, container: tuple["subprocess.Popen[str]", str]
) -> None:
    started, _ = container
    ranks = sorted(psutil.Process(started.pid).children(), key=rank_of)
    ranks[rank].kill()
    assert started.stderr
    log = started.stderr.read()
    assert started.wait() == 1
    assert re.search(rf"failed \(exitcode: -9\) local_rank: {rank}", log)
    assert not [process for process in ranks if process.is_running()]
