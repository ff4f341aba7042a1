"""Runs in containers, by `make test-containers`: the quickstart through scaling, kills, a stop and a resume;
an agent's run with gateways, a foreign Redis server and shared memory.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import check_output
from typing import Any

import pytest

from tests.containers.compose import Project, docker, inspect, kill_and_wait_for_restart, main_process

ROOT = Path(__file__).parents[2]
SERVERS = Path(__file__).with_name("servers")
SERVICES = ("coordinator", "reward", "trainer", "rollout", "store")
ENVIRONMENT = {
    "ATOLL_TOKEN": "0123456789abcdef" * 2,
    "BASE_IMAGE": "atoll-test/base",
    "LIGHT_IMAGE": "atoll-test/light",
    "CPU_IMAGE": "atoll-test/cpu",
    "VERSION": "0.1.0",
    "DOCKER_BUILDKIT": "0",
}
# The quickstart with an external server beside its grader and a sandbox. It ends when it is told to.
RUN_FILE = """
base = "../examples/arithmetic.toml"

[run]
name = "quickstart"
steps = 100000
target_reward = {target}

[checkpoint]
every = 50

[[reward.graders]]
name = "exact_match"

[[reward.graders]]
name = "server:last_number"
weight = 0.0

[reward.sandbox]
programs = 2
"""


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Project]:
    (tmp_path / "run.toml").write_text(RUN_FILE.format(target=2.0))
    tmp_path.chmod(0o755)  # services read it as another user
    environment = ENVIRONMENT | {"FILES": str(tmp_path), "RUN_FILE": "files/run.toml"}
    yield from taken_down(Project("atoll-test-quickstart", ("reward-server",), environment))


def taken_down(project: Project) -> Iterator[Project]:
    for service in ("config", "trainer"):  # an image each, that others share
        project.compose("build", service)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "0")


def test_quickstart(quickstart: Project) -> None:
    quickstart.up()
    with quickstart.rows() as wait:
        wait(lambda row: row["step"] >= 1)
        check_images(quickstart)
        for service in (*SERVICES, "reward-server"):
            check_contained(quickstart, service)
        check_tier(quickstart)
        wait(lambda row: "reward/server:last_number/mean" in row)

        quickstart.up("--no-recreate", "--scale", "rollout=3")
        wait(lambda row: row["rollout/num_routed"] == 3)
        quickstart.up("--no-recreate", "--scale", "rollout=1")
        wait(lambda row: row["rollout/num_routed"] == 1)

        for service in ("reward", "rollout", "trainer"):
            container = quickstart.container(service)
            restarted = kill_and_wait_for_restart(container)
            wait(lambda row, after=restarted: row["time"] > after)
            assert inspect(container)["RestartCount"] == 1

        quickstart.compose("stop")
        for service in SERVICES:
            assert exit_code(quickstart, service) == 0, service
        stopped = last_row(quickstart)

        path = Path(quickstart.environment["FILES"], "run.toml")
        path.write_text(RUN_FILE.format(target=0.65))
        quickstart.up()
        first = wait(lambda row: row["time"] > stopped["time"])
        assert first["step"] > stopped["step"]  # none is repeated: the stop has saved it
        for service in SERVICES[:-1]:  # the store stays
            assert docker("wait", quickstart.container(service)) == "0\n", service

    summary = json.loads(quickstart.read("runs/quickstart/summary.json"))
    assert summary["outcome"] == "target reached"
    rows = [json.loads(line) for line in quickstart.read("runs/quickstart/metrics.jsonl").splitlines()]
    rewards = [row["critic/score/mean"] for row in rows[-10:]]
    print(f"{len(rows)} steps, reward {sum(rewards) / 10:.2f}")
    assert sum(rewards) / 10 >= 0.6
    audit = quickstart.compose("run", "--rm", "--no-deps", "config", "atoll", "audit", "runs/quickstart")
    print(audit.splitlines()[-1])

    quickstart.compose("down", "--volumes")
    assert quickstart.leftovers() == {"containers": "", "networks": "", "volumes": ""}


@pytest.fixture
def agents() -> Iterator[Project]:
    environment = ENVIRONMENT | {
        "RUN_NAME": "agents",
        "RUN_FILE": "examples/agents.toml",
        "DATA": "tools",
        "WEIGHTS_TRANSPORT": "shm",
        "STORE_URL": f"redis://:{ENVIRONMENT['ATOLL_TOKEN']}@elsewhere:6379/0",
        "TOOL_IMAGE": "atoll-test/tools",
        "ENVIRONMENT_IMAGE": "atoll-test/environment",
    }
    overlays = ("gateway", "redis", "shared-memory", "tool-server", "environment-server")
    yield from taken_down(Project("atoll-test-agents", overlays, environment))


def test_agents_with_two_gateways_servers_a_foreign_store_and_shared_memory(agents: Project) -> None:
    for server in ("tools", "environment"):
        build = ("build", "--target", server, "--tag", f"atoll-test/{server}")
        docker(*build, "--file", str(SERVERS / "Dockerfile"), str(ROOT / "tests"))
    agents.compose("create", "--scale", "gateway=2")
    with foreign_store(agents), agents.rows() as wait:
        agents.up("--no-recreate", "--scale", "gateway=2")
        row = wait(lambda row: row["step"] == 3)
        assert row["weights/num_replicas"] == 1
        assert row["weights/failed"] == 0
        assert row["agents/turns/mean"] > 1
        assert agents.containers("store") == []
        ask = ("exec", "-T", "coordinator", "atoll", "status", "--coordinator", "coordinator:7000")
        names = agents.compose(*ask)
        for server in ("tool         tools", "env          environment"):
            assert re.search(f"{server} .* healthy$", names, re.MULTILINE), names
        for gateway in agents.containers("gateway"):
            assert f"gateway-{inspect(gateway)['Config']['Hostname']}" in names
        for service in ("gateway", "agents"):
            restarted = kill_and_wait_for_restart(agents.containers(service)[0])
            wait(lambda row, after=restarted: row["time"] > after)
        settings = json.loads(agents.read("runs/agents/config.json"))
        assert settings["weights"]["transport"] == "shm"
        shared = {inspect(agents.container(name))["HostConfig"]["PidMode"] for name in ("trainer", "rollout")}
        assert shared == {f"container:{agents.container('holder')}"}


@contextmanager
def foreign_store(project: Project) -> Iterator[None]:
    """A Redis server that no Compose file knows, in the network of the overlay."""
    name = f"{project.name}-elsewhere"
    where = ("--network", f"{project.name}_outside", "--network-alias", "elsewhere")
    serve = ("atoll", "serve", "store", "--folder", "/tmp/store", "--host", "0.0.0.0", "--port", "6379")
    token = ("--env", f"ATOLL_TOKEN={project.environment['ATOLL_TOKEN']}")
    docker("run", "--rm", "--detach", "--name", name, *where, *token, project.image, *serve)
    try:
        yield
    finally:
        docker("rm", "--force", name)


def check_images(project: Project) -> None:
    for name in ("light", "cpu"):
        found = inspect(f"atoll-test/{name}")["Config"]
        assert found["User"] == "10001"
        assert found["Labels"]["org.opencontainers.image.version"] == "0.1.0"


def check_contained(project: Project, service: str) -> None:
    """As the kernel has it, not as the files ask for it."""
    container = project.container(service)
    found = inspect(container)
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["Privileged"] is False
    for network in found["NetworkSettings"]["Networks"]:
        assert json.loads(docker("network", "inspect", network))[0]["Internal"] is True, network
    pids = check_output(["pgrep", "--parent", str(main_process(container))], text=True).split()
    for pid in (str(main_process(container)), *pids):
        lines = Path("/proc", pid, "status").read_text().splitlines()
        status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
        assert status["Uid"] == ["10001"] * 4, service
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[kind][0], 16) == 0, (service, kind)
        assert status["NoNewPrivs"] == ["1"], service
        assert status["Seccomp"] == ["2"], service
    # as the services' own processes: the rest of the file system is read-only, /tmp executes nothing
    attempt = "touch /app/x 2>/dev/null || touch /etc/x 2>/dev/null || ! mount | grep -q ' /tmp .*noexec'"
    assert docker("exec", container, "sh", "-c", f"if {attempt}; then echo open; fi").strip() == "", service


def check_tier(project: Project) -> None:
    """Of a sandbox under the reward service's profile; that of the others allows no namespaces."""
    script = "from atoll.cli.doctor import sandbox; import asyncio; print(asyncio.run(sandbox()).found)"
    tiers = {
        service: docker("exec", project.container(service), "python3", "-c", script).strip()
        for service in ("reward", "coordinator")
    }
    assert tiers["reward"] == "landlock, seccomp, namespaces"
    assert tiers["coordinator"].startswith("landlock, seccomp; no namespaces: ")


def exit_code(project: Project, service: str) -> int:
    return int(inspect(project.container(service))["State"]["ExitCode"])


def last_row(project: Project) -> dict[str, Any]:
    rows = project.read(f"runs/{project.run_name}/metrics.jsonl")
    row: dict[str, Any] = json.loads(rows.splitlines()[-1])
    return row
