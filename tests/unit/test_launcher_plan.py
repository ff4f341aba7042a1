"""Which processes a run has, and how they are wired."""

import sys
from pathlib import Path

import pytest

from services.cli.launcher import claim_folder, coordinator_of, services_of
from services.config.schema import RunConfig
from services.runtime.errors import UserError


def config(**sections: object) -> RunConfig:
    plain = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": [{"path": "train.parquet"}]},
    }
    return RunConfig.model_validate(plain | sections)


def test_a_training_run_has_every_rank_and_replica() -> None:
    services = services_of(
        config(
            trainer={"parallel": {"tensor": 2, "data": 2}, "threads": 3},
            rollout={"replicas": 2, "threads": 5, "max_restarts": 7},
        ),
        "127.0.0.1:9",
    )
    by_name = {service.name: service for service in services}
    assert list(by_name) == [
        *("reward-0", "actor-0", "actor-1", "actor-2", "actor-3", "rollout-0", "rollout-1")
    ]
    last = by_name["actor-3"]
    assert last.command == (
        *(sys.executable, "-m", "services.trainer", "--config", "runs/toy/config.json"),
        *("--role", "actor", "--name", "actor-3", "--coordinator", "127.0.0.1:9"),
    )
    port = last.environment["MASTER_PORT"]
    assert 1024 <= int(port) < 65536
    for rank in range(4):
        assert by_name[f"actor-{rank}"].environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "3",
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "268435456",
        }
    assert by_name["rollout-1"].environment == {
        "OMP_NUM_THREADS": "5",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
    }
    assert {name: service.max_restarts for name, service in by_name.items() if service.max_restarts} == {
        "rollout-0": 7,
        "rollout-1": 7,
    }


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"run": {"name": "toy", "steps": 1, "mode": "rollout_only"}}, ["reward-0", "rollout-0"]),
        ({"run": {"name": "toy", "steps": 1, "mode": "train_only"}, "data": {"replay": "d"}}, ["actor-0"]),
    ],
)
def test_a_mode_leaves_out_what_it_does_not_need(sections: dict[str, object], names: list[str]) -> None:
    assert [service.name for service in services_of(config(**sections), "127.0.0.1:9")] == names


def test_resume_reaches_the_coordinator() -> None:
    fresh = coordinator_of(config(), "unix:///s", resume=False).command
    assert fresh[-2:] == ("--store", "unix:///s")
    assert coordinator_of(config(), "unix:///s", resume=True).command == (*fresh, "--resume")


def test_a_folder_is_taken_once_a_step_is_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "toy"
    with pytest.raises(UserError, match="holds no run"):
        claim_folder(folder, resume=True)
    claim_folder(folder, resume=False)
    (folder / "metrics.jsonl").touch()
    claim_folder(folder, resume=False)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="--resume"):
        claim_folder(folder, resume=False)
    claim_folder(folder, resume=True)
