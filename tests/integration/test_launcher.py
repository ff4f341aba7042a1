"""The launcher's promises, with fake services: deaths are told, restarts counted, nothing is left behind."""

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atoll.cli.launch import processes
from atoll.cli.launch.active_runs import RunAddress
from atoll.cli.launch.active_runs import run_in as folders_run
from atoll.cli.launch.interrupts import handle_interrupts
from atoll.cli.launch.launcher import launch, supervise
from atoll.cli.launch.processes import Fleet, ServiceCommand, ServiceDiedError, ServiceGroup
from atoll.cli.launch.tokens import Tokens
from atoll.config.load import read_resolved, validate, write_resolved
from atoll.config.schema import RunConfig
from atoll.runtime import store
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import UnauthenticatedError, UserError
from atoll.runtime.process import EXIT_RANK_LOST, EXIT_RESTARTS_EXHAUSTED
from tests.integration.fake_run import fake

TIMEOUT_S = 30


def shell(name: str, script: str) -> ServiceCommand:
    """A process that serves at once, then runs a script."""
    serve = """echo pid $$ port $MASTER_PORT; echo '{"address": ""}' > /proc/self/fd/$2; """
    return ServiceCommand(name, ("/bin/sh", "-c", serve + script, name))


ANSWERS_ONCE = """
import argparse, os, signal, socket
parser = argparse.ArgumentParser()
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--http-fd", type=int)
fds = parser.parse_args()
print("pid", os.getpid(), flush=True)
os.write(fds.ready_fd, b'{"address": ""}\\n')
client, _ = socket.socket(fileno=fds.http_fd).accept()
client.sendall(str(os.getpid()).encode())
client.close()
os.kill(os.getpid(), signal.SIGKILL)
"""
SERVES, DIES, DIES_LATER = "exec sleep 60", "kill -KILL $$", "sleep 0.3; kill -KILL $$"
IF_LOST = "the run continues without it; send the rest later"
LOSES_A_RANK = f"echo another rank is gone; exit {EXIT_RANK_LOST}"


def pids(logs: Path, name: str) -> list[int]:
    """Of every life of a fake service, from its log."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", (logs / f"{name}.log").read_text())]


@contextmanager
def running(folder: Path, coordinator: str, *behaviours: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher of fakes whose services have all registered."""
    script = Path(__file__).with_name("fake_run.py")
    command = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.fake_run", str(folder), coordinator, *behaviours],
        cwd=script.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        yield command
    finally:
        command.kill()
        command.wait()


def children(command: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(command.pid).children(recursive=True)


async def test_death_at_start_is_told_and_not_repeated(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError) as caught:
            await fleet.keep(fake("trainer-0", "refuses", max_restarts=3))
    message = str(caught.value)
    assert message.startswith("trainer-0 did not start (exit code 1)")
    assert str(tmp_path / "trainer-0.log") in message
    assert "the model folder /nowhere has no config.json" in message.splitlines()[-1]
    assert len(pids(tmp_path, "trainer-0")) == 1


async def test_a_sentence_that_a_service_ends_with_is_told_without_its_log(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    words = "Traceback (most recent call last):", "reward-0: the disk is full", "  free 3 GB"
    group = ServiceGroup((shell("reward-0", "".join(f"echo '{line}';" for line in words) + "exit 1"),))
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError) as caught:
            await fleet.keep(group)
    assert str(caught.value) == (
        f"reward-0 died (exit code 1): the disk is full\n  free 3 GB\n  its log: {log}"
    )
    assert all(line in log.read_text() for line in words)


async def test_a_bug_is_told_with_its_traceback_even_after_another_life(tmp_path: Path) -> None:
    (tmp_path / "reward-0.log").write_text("reward-0: the disk is full\n")
    group = ServiceGroup((shell("reward-0", "echo KeyError: 7; exit 1"),))
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"(?s)reward-0\.log ends with:\n.*KeyError: 7") as caught:
            await fleet.keep(group)
    assert "the disk is full" not in str(caught.value)


async def test_a_service_is_restarted_as_often_as_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"rollout-0 died \(signal SIGKILL\)"):
            await fleet.keep(fake("rollout-0", "dies", max_restarts=2))
    assert len(set(pids(tmp_path, "rollout-0"))) == 3
    told = [record.getMessage().splitlines() for record in caplog.records]
    assert [lines[0].partition(";")[0] for lines in told] == [
        "restart 1 of 2 of rollout-0: rollout-0 died (signal SIGKILL)",
        "restart 2 of 2 of rollout-0: rollout-0 died (signal SIGKILL)",
    ]


async def test_deaths_of_more_than_an_hour_ago_do_not_count(tmp_path: Path) -> None:
    """One death in each hour, and then two in the last."""
    hours = iter([0.0, 1.1, 2.2, 3.3, 3.4])
    async with Fleet(tmp_path, clock=lambda: 3600 * next(hours)) as fleet:
        with pytest.raises(ServiceDiedError):
            await fleet.keep(fake("rollout-0", "dies", max_restarts=1))
    assert len(set(pids(tmp_path, "rollout-0"))) == 5


async def test_a_group_starts_after_those_that_it_comes_after_serve(tmp_path: Path) -> None:
    """The replica prints what the trainer has written before it serves."""
    told = tmp_path / "told"
    trainer = (
        "/bin/sh",
        "-c",
        f'echo loaded > {told}; echo \'{{"address": ""}}\' > /proc/self/fd/$2; {SERVES}',
    )
    last = ServiceGroup((shell("rollout-0", f"cat {told}; kill -KILL $$"),), after=("actor-0",))
    async with Fleet(tmp_path) as fleet:
        kept = asyncio.gather(
            fleet.keep(last), fleet.keep(ServiceGroup((ServiceCommand("actor-0", (*trainer, "actor-0")),)))
        )
        with pytest.raises(ServiceDiedError, match=r"rollout-0 died (?s:.*)loaded"):
            await kept
        kept.cancel()


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_PAUSE_S", 0.01)
    count = f"echo $$ >> {tmp_path}/lives; lives=$(wc -l < {tmp_path}/lives); [ $lives = 2 ] && exit 1; "
    serve = """echo '{"address": ""}' > /proc/self/fd/$2; """
    service = ServiceCommand("actor-0", ("/bin/sh", "-c", count + serve + DIES, "actor-0"))
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"actor-0 died"):
            await fleet.keep(ServiceGroup((service,), max_restarts=2))
    assert len((tmp_path / "lives").read_text().split()) == 3


async def test_a_service_that_has_given_up_is_not_restarted(tmp_path: Path) -> None:
    gives_up = ServiceGroup((shell("rollout-0", f"exit {EXIT_RESTARTS_EXHAUSTED}"),), max_restarts=3)
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"rollout-0 died \(exit code 4\)"):
            await fleet.keep(gives_up)
    assert len(pids(tmp_path, "rollout-0")) == 1


async def test_connections_that_come_while_a_service_is_down_are_answered_by_the_next(tmp_path: Path) -> None:
    """All three are there before the first life begins; each life answers one and dies."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        service = ServiceCommand("gateway-0", (sys.executable, "-c", ANSWERS_ONCE), {}, listener)
        async with Fleet(tmp_path) as fleet:
            with pytest.raises(ServiceDiedError, match=r"gateway-0 died \(signal SIGKILL\)"):
                await fleet.keep(ServiceGroup((service,), max_restarts=2))
        lives = [client.makefile().read() for client in clients]
        for client in clients:
            client.close()
    assert [int(life) for life in lives] == pids(tmp_path, "gateway-0")


async def test_a_death_ends_its_group_and_all_of_it_starts_again_at_another_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = shell("actor-0", SERVES), shell("actor-1", DIES), shell("actor-2", SERVES)
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"actor-1 died \(signal SIGKILL\)"):
            await fleet.keep(ServiceGroup(ranks, max_restarts=1))
        lives = [pids(tmp_path, f"actor-{number}") for number in range(3)]
        assert [len(set(life)) for life in lives] == [2, 2, 2]
        assert not any(psutil.pid_exists(first) for first, _ in lives)
    ports = [re.findall(r"port (\d+)", (tmp_path / f"actor-{number}.log").read_text()) for number in range(3)]
    assert ports[0] == ports[1] == ports[2]
    assert len(set(ports[0])) == 2
    assert len(caplog.records) == 1
    told = caplog.records[0].getMessage()
    assert told.startswith("restart 1 of 1 of actor-0, actor-1, actor-2: actor-1 died (signal SIGKILL)")
    assert told.endswith(f"  pid {lives[1][0]} port {ports[1][0]}")


async def test_the_rank_to_blame_is_named_though_its_peers_end_first(tmp_path: Path) -> None:
    ranks = shell("actor-0", LOSES_A_RANK), shell("actor-1", DIES_LATER)
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"^actor-1 died \(signal SIGKILL\)"):
            await fleet.keep(ServiceGroup(ranks))


async def test_a_rank_that_lost_one_that_only_hangs_is_named_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CAUSE_TIMEOUT_S", 0.2)
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(
            ServiceDiedError, match=r"(?s)^actor-0 died \(exit code 3\).*another rank is gone"
        ):
            await fleet.keep(ServiceGroup((shell("actor-0", LOSES_A_RANK), shell("actor-1", SERVES))))


async def test_an_end_that_nobody_asked_for_is_a_death(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"reward-0 died \(exit code 0\)"):
            await fleet.keep(fake("reward-0", "ends"))


async def test_a_service_that_leaves_in_order_has_not_failed_and_starts_again_while_it_is_wanted(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    async def is_wanted(name: str) -> bool:
        asked.append(name)
        return len(asked) < 3

    async with Fleet(tmp_path) as fleet, asyncio.timeout(TIMEOUT_S):
        await fleet.keep(fake("reward-0", "ends", max_restarts=0), is_wanted)
    assert asked == ["reward-0"] * 3
    assert len(pids(tmp_path, "reward-0")) == 3


async def test_a_service_that_ends_before_it_serves_has_failed_though_nothing_went_wrong(
    tmp_path: Path,
) -> None:
    async def is_wanted(name: str) -> bool:
        raise AssertionError(name)

    ends = ServiceGroup((ServiceCommand("reward-0", ("/bin/sh", "-c", "exit 0")),))
    async with Fleet(tmp_path) as fleet:
        with pytest.raises(ServiceDiedError, match=r"reward-0 did not start \(exit code 0\)"):
            await fleet.keep(ends, is_wanted)


async def test_a_service_that_never_answers_is_given_up(tmp_path: Path) -> None:
    async with Fleet(tmp_path, start_timeout_s=2.0) as fleet:
        expected = r"did not start within 2 s \(coordinator.start_timeout_s\) \(signal SIGKILL\)"
        with pytest.raises(ServiceDiedError, match=expected):
            await fleet.start(fake("trainer-1", "silent"))


async def test_leaving_ends_even_those_that_ignore_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT_S", 0.3)
    async with Fleet(tmp_path) as fleet:
        await fleet.start(fake("polite", "serves"))
        await fleet.start(fake("stubborn", "serves-stubbornly"))
        alive = [pids(tmp_path, name)[0] for name in ("polite", "stubborn")]
        assert all(psutil.pid_exists(pid) for pid in alive)
    assert not any(psutil.pid_exists(pid) for pid in alive)


def test_the_death_of_a_service_ends_the_run(tmp_path: Path) -> None:
    with running(tmp_path, "coordinates", "serves", "serves") as command:
        services = children(command)
        psutil.Process(pids(tmp_path / "logs", "service-1")[0]).kill()
        assert "service-1 died (signal SIGKILL)" in command.communicate(timeout=TIMEOUT_S)[1]
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interrupt_stops_the_run_through_the_coordinator(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path, "coordinates", "serves", "serves") as command:
        services = children(command)
        assert len(services) == 3
        assert (tmp_path / "coordinator.address").exists()
        command.send_signal(number)
        assert command.communicate(timeout=TIMEOUT_S)[0] == "stopped\n"
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []
        assert not (tmp_path / "coordinator.address").exists()


def test_a_closed_terminal_stops_the_run_as_an_interrupt_does(tmp_path: Path) -> None:
    """Although nothing can be printed any more."""
    master, its_end = os.openpty()
    fakes = ("-m", "tests.integration.fake_run", tmp_path, "coordinates", "serves")
    command = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, *fakes],
        cwd=Path(__file__).parents[2],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    try:
        with open(master) as terminal:
            assert terminal.readline() == "up\n"
            services = children(command)
        assert command.wait(TIMEOUT_S) == 0
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []
    finally:
        command.kill()
        command.wait()


def test_nohup_keeps_a_run_from_being_stopped_by_a_closed_terminal() -> None:
    async def hang_up() -> bool:
        stop = asyncio.Event()
        with handle_interrupts(stop):
            signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0)
        return stop.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(hang_up())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_at_the_start_waits_for_nobody(tmp_path: Path) -> None:
    with running(tmp_path, "coordinates-the-start", "serves") as command:
        services = children(command)
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=TIMEOUT_S)[0] == "stopped\n"
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []


def test_the_second_interrupt_waits_for_nobody(tmp_path: Path) -> None:
    with running(tmp_path, "coordinates-stubbornly", "serves") as command:
        services = children(command)
        command.send_signal(signal.SIGTERM)
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=TIMEOUT_S)[0] == "stopped\n"
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []


async def test_a_run_has_a_token_of_its_own_which_only_its_folder_and_processes_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_TOKEN")
    tokens = Tokens.of_this_run()
    seen: list[str] = []

    async def follow(client: CoordinatorClient) -> None:
        await client.status()  # it has services that were admitted
        stranger = CoordinatorClient(client.address, Caller())
        with pytest.raises(UnauthenticatedError):
            await stranger.status()
        await stranger.close()
        assert folders_run(tmp_path, in_full=True) == RunAddress(client.address, Caller(token=tokens.run))
        for process in psutil.Process().children(recursive=True):
            seen.extend(process.cmdline())
        await client.stop_run()
        await asyncio.Event().wait()

    coordinator = fake("coordinator", "coordinates", "--expected", "1")
    await supervise(tmp_path, tokens, coordinator, lambda at: [fake("service-0", "serves", at)], follow)
    seen += [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert any("fake_service.py" in text for text in seen)
    assert not any(tokens.run in text or tokens.operators in text for text in seen)


async def test_what_belongs_to_another_host_is_left_to_its_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def follow(client: CoordinatorClient) -> None:
        await client.status()
        await client.stop_run()
        await asyncio.Event().wait()

    def services(address: str) -> list[ServiceGroup]:
        there = replace(fake("rollout-0", "serves", address), elsewhere="  on node1: atoll serve rollout")
        return [fake("actor-0", "serves", address), there]

    coordinator = fake("coordinator", "coordinates", "--expected", "1")
    await supervise(tmp_path, Tokens.of_this_run(), coordinator, services, follow)
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {"coordinator", "actor-0"}
    assert "start rollout-0 by hand:\n  on node1: atoll serve rollout" in caplog.messages


async def test_services_that_the_run_can_do_without_neither_end_nor_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails at the start, one dies as often as it may, one hangs: another one serves, and the run is
    stopped."""
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT_S", 0.3)
    told: list[str] = []
    are_lost = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            if sum("send the rest later" in text for text in told) == 2:
                are_lost.set()

    async def follow(client: CoordinatorClient) -> None:
        await client.status()  # what serves has registered
        await are_lost.wait()
        await client.stop_run()
        await asyncio.Event().wait()

    def services(address: str) -> list[ServiceGroup]:
        trackers = [
            replace(fake(f"tracking-{behaviour}", behaviour, address, max_restarts=1), if_lost=IF_LOST)
            for behaviour in ("refuses", "dies", "serves-stubbornly")
        ]
        return [fake("service-0", "serves", address), *trackers]

    coordinator = fake("coordinator", "coordinates", "--expected", "2")
    logging.getLogger(processes.__name__).addHandler(listener := Listener())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await supervise(tmp_path, Tokens.of_this_run(), coordinator, services, follow)
    finally:
        logging.getLogger(processes.__name__).removeHandler(listener)
    assert sorted(re.sub(r";.*", "", text.splitlines()[0]) for text in told) == [
        "restart 1 of 1 of tracking-dies: tracking-dies died (signal SIGKILL)",
        "tracking-dies died (signal SIGKILL)",
        "tracking-refuses did not start (exit code 1)",
    ]
    lives = {name: len(pids(tmp_path / "logs", f"tracking-{name}")) for name in ("refuses", "dies")}
    assert lives == {"refuses": 1, "dies": 2}


def test_a_killed_launcher_takes_its_services_along(tmp_path: Path) -> None:
    with running(tmp_path, "coordinates", "serves", "serves-stubbornly") as command:
        services = children(command)
        command.kill()
        assert psutil.wait_procs(services, TIMEOUT_S)[1] == []


def test_a_second_launcher_leaves_the_run_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its services read it again when they are restarted."""
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.1)

    def config(steps: int) -> RunConfig:
        data = {"train": [{"path": "train.parquet"}]}
        run = {"name": "toy", "steps": steps, "dir": tmp_path}
        return validate({"run": run, "model": {"path": "model"}, "data": data}, "toy")

    async def follow(client: CoordinatorClient) -> None:
        pytest.fail("it has begun")

    folder = config(7).folder
    with store.run_embedded_server(folder / "store"):
        write_resolved(config(7), folder / "config.json")
        with pytest.raises(UserError, match="another run of this name is alive"):
            launch(config(8), follow, resume=False)
    assert read_resolved(folder / "config.json").run.steps == 7
