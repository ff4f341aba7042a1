"""Which processes a run has, and how they are wired."""

import errno
import resource
import socket
import stat
import sys
from pathlib import Path

import pytest

from atoll.cli.launch import active_runs
from atoll.cli.launch.launcher import (
    ADDRESS_FILE,
    check_interpreter,
    claim_folder,
    coordinator_group,
    gateway_listeners,
    launch,
    publish_address,
    service_groups,
    service_names,
)
from atoll.cli.launch.tokens import Tokens
from atoll.config.errors import ConfigError
from atoll.config.load import write_resolved
from atoll.config.schema import RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import UserError
from atoll.runtime.ports import reserve_port
from tests.builders import run_config

TOKENS = Tokens(run="for-services", operators="for-people")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"graders": ["server:judge"]}, False),
        ({"graders": ["server:judge", "exact_match"]}, True),
        ({"graders": ["server:judge"], "sandbox": {}}, True),  # agents' tools run code there
    ],
)
def test_a_run_whose_graders_are_all_servers_has_no_reward_service(
    reward: dict[str, object], expected: bool
) -> None:
    groups = service_groups(run_config(reward=reward), "127.0.0.1:9")
    assert (("reward-0",) in [group.names for group in groups]) is expected


def test_a_training_run_has_every_rank_and_replica() -> None:
    groups = service_groups(
        run_config(
            trainer={"parallel": {"tensor": 2, "data": 2}, "threads": 3, "max_restarts": 2},
            rollout={"replicas": 2, "threads": 5, "max_restarts": 7},
        ),
        "127.0.0.1:9",
    )
    assert [group.names for group in groups] == [
        ("reward-0",),
        ("actor-0", "actor-1", "actor-2", "actor-3"),
        ("rollout-0",),
        ("rollout-1",),
    ]
    by_name = {service.name: service for group in groups for service in group.services}
    last = by_name["actor-3"]
    assert last.command == (
        *(sys.executable, "-m", "atoll.trainer", "--config", "runs/toy/config.json"),
        *("--role", "actor", "--name", "actor-3", "--coordinator", "127.0.0.1:9"),
    )
    for rank in range(4):
        assert by_name[f"actor-{rank}"].environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "4",
            "OMP_NUM_THREADS": "3",
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "268435456",
            "CUDA_VISIBLE_DEVICES": "",
        }
    assert by_name["rollout-1"].environment == {
        "OMP_NUM_THREADS": "5",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert [group.max_restarts for group in groups] == [3, 2, 7, 7]


def test_replicas_run_in_their_own_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    groups = service_groups(run_config(rollout={"python": python}), "127.0.0.1:9")
    used = {service.name: service.command[0] for group in groups for service in group.services}
    assert used == {"reward-0": sys.executable, "actor-0": sys.executable, "rollout-0": str(python)}
    check_interpreter("rollout.python", None)
    with pytest.raises(
        UserError, match=rf"rollout.python = {python} is not an executable: set it to the Python interpreter"
    ):
        check_interpreter("rollout.python", python)
    python.touch(0o755)
    check_interpreter("rollout.python", python)


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"run": {"name": "toy", "steps": 1, "mode": "rollout_only"}}, ["reward-0", "rollout-0"]),
        ({"run": {"mode": "train_only"}, "data": {"replay": "d"}}, ["actor-0"]),
    ],
)
def test_a_mode_leaves_out_what_it_does_not_need(sections: dict[str, object], names: list[str]) -> None:
    assert [group.names for group in service_groups(run_config(**sections), "127.0.0.1:9")] == [
        (name,) for name in names
    ]


def test_reward_services_share_the_load_and_are_started_again() -> None:
    groups = service_groups(run_config(reward={"services": 2, "max_restarts": 1}), "127.0.0.1:9")
    assert [(group.names, group.max_restarts) for group in groups[:2]] == [
        (("reward-0",), 1),
        (("reward-1",), 1),
    ]
    (second,) = groups[1].services
    assert second.command[second.command.index("--name") + 1] == "reward-1"


def agents_run(folder: Path, **gateway: object) -> RunConfig:
    (folder / "mine.py").write_text("async def agent(session): ...")
    function = f"{folder}/mine.py:agent"
    return run_config(
        data={"train": [{"path": "a.jsonl", "agent": "a"}, {"path": "b.jsonl", "agent": "b"}]},
        agents=[{"name": "a", "function": function, "processes": 2}, {"name": "b", "function": function}],
        gateway={"instances": 2, "max_restarts": 5} | gateway,
    )


def test_agents_run_in_environments_of_their_own(tmp_path: Path) -> None:
    config = agents_run(tmp_path)
    python = tmp_path / "python"
    agents = (config.agents[0].model_copy(update={"python": python}), config.agents[1])
    groups = service_groups(config.model_copy(update={"agents": agents}), "127.0.0.1:9")
    used = {service.name: service.command[0] for group in groups for service in group.services}
    assert [used[f"agents-{index}"] for index in range(3)] == [str(python), str(python), sys.executable]


def test_a_run_with_agents_has_their_processes_and_gateways(tmp_path: Path) -> None:
    config = agents_run(tmp_path)
    with gateway_listeners(config) as listeners:
        groups = service_groups(config, "127.0.0.1:9", store="unix:///s", listeners=listeners)
        added = [group for group in groups if group.names[0].startswith(("gateway", "agents"))]
        assert [(group.names, group.max_restarts) for group in added] == [
            (("gateway-0",), 5),
            (("gateway-1",), 5),
            (("agents-0",), 3),
            (("agents-1",), 3),
            (("agents-2",), 3),
        ]
        commands = [group.services[0] for group in added]
        assert [command.listener for command in commands] == [*listeners, None, None, None]
        assert commands[1].command[1:] == (
            *("-m", "atoll.gateway", "--config", "runs/toy/config.json", "--name", "gateway-1"),
            *("--store", "unix:///s", "--coordinator", "127.0.0.1:9"),
        )
        assert commands[4].command[1:] == (
            *("-m", "atoll.agents", "--config", "runs/toy/config.json", "--name", "agents-2"),
            *("--agent", "b", "--coordinator", "127.0.0.1:9"),
        )
        assert [command.command[-3] for command in commands[2:]] == ["a", "a", "b"]
        assert all(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for listener in listeners)
    with gateway_listeners(run_config()) as none:
        assert none == []


def test_gateways_listen_on_ports_that_follow_each_other(tmp_path: Path) -> None:
    host = "127.0.0.19"  # whose ports no other test takes
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"gateway-0 cannot listen on {host}:{port}: Address already"),
            gateway_listeners(agents_run(tmp_path, host=host, port=port)),
        ):
            pytest.fail("it listens")
        with (
            pytest.raises(UserError, match=rf"gateway-1 cannot listen on {host}:{port}: .* free port"),
            gateway_listeners(agents_run(tmp_path, host=host, port=port - 1)),
        ):
            pytest.fail("it listens")
    with gateway_listeners(agents_run(tmp_path, host=host, port=port - 1)) as listeners:
        assert [listener.getsockname()[1] for listener in listeners] == [port - 1, port]


def test_resume_reaches_the_coordinator() -> None:
    fresh = coordinator_group(run_config(), "unix:///s", resume=False).services[0].command
    assert fresh[-2:] == ("--store", "unix:///s")
    assert coordinator_group(run_config(), "unix:///s", resume=True).services[0].command == (
        *fresh,
        "--resume",
    )


def test_a_folder_is_taken_once_a_step_is_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "toy"
    with pytest.raises(UserError, match="contains no run"):
        claim_folder(folder, resume=True)
    claim_folder(folder, resume=False)
    (folder / "metrics.jsonl").touch()
    claim_folder(folder, resume=False)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="--resume"):
        claim_folder(folder, resume=False)
    claim_folder(folder, resume=True)


def test_a_reserved_port_goes_to_the_server_that_asks_for_it_and_to_nobody_else() -> None:
    with reserve_port() as port, socket.socket() as stranger, socket.socket() as server:
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PyTorch's store does
        server.bind(("127.0.0.1", port))
        server.listen()


def test_a_launcher_leaves_the_address_of_the_one_that_took_its_run_over(tmp_path: Path) -> None:
    with publish_address(tmp_path, "127.0.0.1:2", TOKENS):
        with publish_address(tmp_path, "127.0.0.1:1", TOKENS):  # the earlier one ends first
            (tmp_path / ADDRESS_FILE).write_text("127.0.0.1:2")
        assert (tmp_path / ADDRESS_FILE).read_text() == "127.0.0.1:2"
        assert active_runs.run_in(tmp_path) == active_runs.RunAddress(
            "127.0.0.1:2", Caller(token="for-people")
        )
    assert list(tmp_path.iterdir()) == []


def test_commands_find_the_operators_token_and_if_they_call_services_the_runs_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not running \(there is no .*/operator\.token\)"):
        active_runs.run_in(tmp_path)
    with publish_address(tmp_path, "127.0.0.1:2", TOKENS):
        assert active_runs.run_in(tmp_path).caller == Caller(token="for-people")
        assert active_runs.run_in(tmp_path, in_full=True).caller == Caller(token="for-services")


def test_a_coordinator_elsewhere_is_called_with_the_token_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "for-services")
    assert active_runs.run_at("there:1").caller == Caller(token="for-services")
    monkeypatch.setenv("ATOLL_OPERATOR_TOKEN", "for-people")
    assert active_runs.run_at("there:1").caller == Caller(token="for-people")
    assert active_runs.run_at("there:1", in_full=True).caller == Caller(token="for-services")


def test_only_its_owner_can_read_a_runs_tokens_address_and_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch(0o644)  # of a start that an earlier version made
    write_resolved(run_config(), tmp_path / "config.json")
    with publish_address(tmp_path, "127.0.0.1:2", TOKENS):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    names = "config.json", "coordinator.address", "coordinator.token", "operator.token"
    assert modes == dict.fromkeys(names, 0o600)


def test_another_users_run_is_called_with_the_token_that_its_owner_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"operator\.token belongs to another user: ask them for"):
        active_runs.run_in(tmp_path)


def test_each_run_has_random_tokens_unless_the_environment_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATOLL_TOKEN")
    first, second = Tokens.of_this_run(), Tokens.of_this_run()
    assert len({first.run, first.operators, second.run, second.operators}) == 4
    assert min(map(len, (first.run, first.operators))) >= 32
    monkeypatch.setenv("ATOLL_TOKEN", "for-services")
    assert Tokens.of_this_run().run == "for-services"
    assert "for-services" not in repr(Tokens.of_this_run())


@pytest.mark.parametrize("variable", ["ATOLL_TOKEN", "ATOLL_OPERATOR_TOKEN"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_token_is_an_error_before_anything_starts(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(client: CoordinatorClient) -> None:
        pytest.fail("it has begun")

    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} is empty, expected a secret"):
        launch(run_config(run={"name": "toy", "steps": 1, "dir": tmp_path}), follow, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_low_limit_of_open_files_is_named_before_anything_starts(tmp_path: Path) -> None:
    async def never(_client: CoordinatorClient) -> None:
        pytest.fail("the run has begun")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(UserError, match="limit of open files is 64, expected at least 256: raise it"):
            launch(run_config({"run": {"dir": tmp_path}}), never, resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_the_services_that_a_run_waits_for_are_named() -> None:
    """Neither further ranks nor trackers, which do not register."""
    config = run_config(
        trainer={"parallel": {"data": 2}}, rollout={"replicas": 2}, tracking={"to": ["tensorboard"]}
    )
    assert sorted(service_names(config)) == ["actor-0", "reward-0", "rollout-0", "rollout-1"]
