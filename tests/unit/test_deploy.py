"""deploy/, as far as it can be checked without an engine; `make test-containers` does the rest."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.cli.health import DEFAULT_ADDRESS
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.runtime.gpus import resolve_for_others

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
OVERLAYS = sorted(path for path in COMPOSE.glob("*.yaml") if path.stem not in ("compose", "common"))


def services(path: Path) -> dict[str, dict[str, Any]]:
    """As written, before Compose merges files."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return found


def test_every_variable_is_listed_and_every_listed_one_is_used() -> None:
    text = "".join(path.read_text() for path in COMPOSE.glob("*.yaml"))
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text))
    listed = set(re.findall(r"^#?([A-Z_]+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    assert used == listed


@pytest.mark.parametrize("path", [COMPOSE / "compose.yaml", *OVERLAYS], ids=lambda path: path.stem)
def test_every_container_is_confined(path: Path) -> None:
    confined = services(COMPOSE / "common.yaml")["contained"]
    assert confined["user"] == "10001:10001"
    assert confined["read_only"] is True
    assert confined["cap_drop"] == ["ALL"]
    assert confined["security_opt"] == ["no-new-privileges:true"]
    below = ("compose", "gateway") if path.stem != "compose" else ()
    known = {name for file in below for name in services(COMPOSE / f"{file}.yaml") if file != path.stem}
    for name, service in services(path).items():
        assert name in known or service["extends"]["file"] == "common.yaml", name
        assert not service.keys() & {"privileged", "cap_add", "devices"}, name
        assert ("security_opt" in service) == (name == "reward"), name


def test_services_listen_where_the_health_check_asks() -> None:
    port = DEFAULT_ADDRESS.rpartition(":")[2]
    for path in (COMPOSE / "compose.yaml", COMPOSE / "gateway.yaml"):
        for name, service in services(path).items():
            if service.get("healthcheck", {}).get("test") == ["CMD", "atoll", "health"]:
                words = " ".join(service["command"])
                assert name == "coordinator" or f"--port {port}" in words, name
    assert services(COMPOSE / "compose.yaml")["config"]["environment"]["SET_PORT"].endswith(f"={port}")


def test_docker_stops_no_service_before_its_grace_ends() -> None:
    default = RunConfig.model_fields["coordinator"].default.drain_grace_s
    config = services(COMPOSE / "compose.yaml")["config"]["environment"]["SET_GRACE"]
    assert config == f"coordinator.drain_grace_s=${{DRAIN_GRACE_S:-{default:g}}}"
    docker = services(COMPOSE / "common.yaml")["contained"]["stop_grace_period"]
    assert docker == "${STOP_GRACE:-30s}"
    assert default < 30


def test_the_run_file_of_the_gpu_profile_needs_no_gpu_to_be_read() -> None:
    config = resolve_for_others(load(COMPOSE / "gpu.toml", ["weights.transport=nccl"]))
    assert config.placement.use_visible_gpus
    assert (config.trainer.device, config.rollout.device) == ("cuda", "cuda")
    assert config.trainer.parallel.world_size == 4  # as TRAINER_GPUS of .env.example
