"""What both Compose generations make of deploy/compose, by `make test-containers`. The GPU profile is only
read: no test runs it.
"""

import json
import os
from functools import cache
from itertools import chain
from typing import Any

import pytest
import yaml

from tests.containers.compose import FILES, run

PROGRAMS = {"1.29": os.environ["COMPOSE_1"], "2": os.environ["COMPOSE_2"]}
OVERLAYS = sorted(path.stem for path in FILES.glob("*.yaml") if path.stem not in ("compose", "common"))
OURS = {"store", "config", "coordinator", "reward", "gateway", "agents", "holder"}
SETTINGS = {
    "ATOLL_TOKEN": "secret",
    "TRAINER_GPUS": "0,1,2,3",
    "ROLLOUT_GPUS": "4,5,6,7",
    "STORE_URL": "redis://elsewhere:6379/0",
    "TOOL_IMAGE": "tools",
    "ENVIRONMENT_IMAGE": "environment",
    "TRAINER_VISIBLE": "0,1",
    "ROLLOUT_VISIBLE": "2,3",
}

each_generation = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


@cache
def read(program: str, profile: str, *overlays: str) -> dict[str, Any]:
    """The services, as Compose has resolved them. YAML of the two generations has JSON's types."""
    files = chain.from_iterable(("-f", f"{name}.yaml") for name in ("compose", *overlays))
    command = (program, "-p", "read", "--env-file", ".env.example", *files, "--profile", profile, "config")
    services = yaml.safe_load(run(*command, environment=SETTINGS))["services"]
    return {name: each for name, each in services.items() if profile in each.get("profiles", [profile])}


def security_options(service: dict[str, Any]) -> set[str]:
    return {option.replace("seccomp:", "seccomp=") for option in service["security_opt"]}


def check_contained(services: dict[str, Any]) -> None:
    """Every service is, whoever wrote its image; one has a seccomp profile of its own."""
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["pids_limit"] == 4096, name
        assert service["restart"] == "on-failure", name
        assert service["stop_grace_period"] == "30s", name
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        assert service["user"] == ("65534:65534" if name == "prometheus" else "10001:10001"), name
        profile = {"seccomp=reward-seccomp.json"} if name == "reward" else set()
        assert security_options(service) == {"no-new-privileges:true"} | profile, name


@each_generation
def test_cpu_profile(program: str) -> None:
    services = read(program, "cpu")
    assert set(services) == {"store", "config", "coordinator", "reward", "trainer", "rollout"}
    check_contained(services)
    for name, service in services.items():
        assert list(service["networks"]) == ["run"], name
        assert "ports" not in service, name
        assert service["environment"]["ATOLL_TOKEN"] == "secret", name
    assert services["config"]["environment"]["SET_TRANSPORT"] == "weights.transport=tcp"
    assert "--resume" in " ".join(services["coordinator"]["command"])


@each_generation
def test_gpu_profile(program: str) -> None:
    services = read(program, "gpu")
    assert set(services) == {"store", "config", "coordinator", "reward", "trainer-gpu", "rollout-gpu"}
    check_contained(services)
    seen = {"trainer-gpu": "0,1,2,3", "rollout-gpu": "4,5,6,7"}
    for name, gpus in seen.items():
        service = services[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["device_ids"] == [gpus]  # the engine joins ids with commas
        assert str(service["shm_size"]) in ("16g", str(16 << 30))
        assert service["ulimits"] == {"memlock": -1, "stack": 67108864, "nofile": 1048576}
        assert service["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert services["trainer-gpu"]["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "gpu"]
    assert services["rollout-gpu"]["command"][-2:] == ["--claim-gpus", "/claims"]
    assert not any("deploy" in service for name, service in services.items() if name not in seen)


@each_generation
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay(program: str, profile: str, overlay: str) -> None:
    below = ["gateway"] if overlay in ("tool-server", "environment-server") else []
    services = read(program, profile, *below, overlay)
    check_contained(services)
    added = set(services) - set(read(program, profile, *below))
    if below:
        assert "servers" in services["agents"]["networks"]
    for name in added - OURS:  # others' code, but for the registrations
        has_token = "ATOLL_TOKEN" in services[name].get("environment", {})
        assert has_token == name.startswith("register-"), name
    if added & {"reward-server", "tool-server", "environment-server"}:
        assert {"run", "servers"} <= set(services["coordinator"]["networks"])
        assert (
            services["config"]["environment"]["SET_SERVER_NETWORKS"]
            == 'coordinator.server_networks=["172.30.77.0/24"]'
        )
        assert [name for name in added if "run" in services[name]["networks"]] == [
            name for name in added if name.startswith("register-")
        ]


@each_generation
def test_shared_memory(program: str) -> None:
    services = read(program, "cpu", "shared-memory")
    assert services["holder"]["ipc"] == "shareable"
    for name in ("trainer", "rollout"):
        assert services[name]["pid"] == services[name]["ipc"] == "service:holder", name
        assert services[name]["init"] is False, name
    assert "pid" not in services["reward"]


@each_generation
def test_a_token_has_no_default(program: str) -> None:
    words = (program, "-p", "read", "--env-file", ".env.example", "-f", "compose.yaml", "config")
    with pytest.raises(AssertionError, match="openssl rand -hex 32"):
        run(*words, environment={"ATOLL_TOKEN": ""})


def test_the_profile_of_reward_allows_what_namespaces_need() -> None:
    profile = json.loads((FILES / "reward-seccomp.json").read_text())
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("includes")
        for name in rule["names"]
    }
    assert allowed >= {"unshare", "setns", "mount", "umount2", "pivot_root"}
    assert not allowed & {"bpf", "init_module", "kexec_load", "open_by_handle_at", "reboot"}
