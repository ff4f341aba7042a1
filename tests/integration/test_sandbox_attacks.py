"""Programs that try to escape the sandbox, and responses that hack the reward.

Runs the whole suite (tests/sandbox/) in each set-up, and a part of it without a sandbox, where it must
succeed: an attack that cannot succeed anywhere tests nothing.
"""

import asyncio
import json
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from atoll.reward.sandbox import landlock, program
from atoll.reward.sandbox.host import start_sandbox
from atoll.runtime.errors import SandboxError
from tests.sandbox.cases import CASES, FAMILIES
from tests.sandbox.setups import SETUPS, USER
from tests.sandbox.targets import MARKER, targets
from tests.sandbox.verdicts import ASSERTS, CHEATS, FUNCTIONS, PROGRAMS

ROOT = Path(__file__).parents[2]
SUITE_S = 120.0
pytestmark = pytest.mark.long

# Attacks that succeed for an ordinary user outside a sandbox, without harm to the machine.
OUTSIDE = """
processes.clone3 processes.clone_as_fork processes.clone_into_new_namespaces
processes.clone_that_shares_memory processes.clone_thread_with_namespaces processes.execve
processes.execve_from_a_thread processes.execve_of_the_interpreter processes.execveat
processes.fexecve_of_memory processes.fexecve_of_own_file processes.fork_in_threads processes.process_pool
processes.pseudo_terminal processes.shell processes.vfork_by_posix_spawn
files.accounts files.change_mode_of_secret files.create_beside_secret files.disk_fill
files.disk_fill_by_deleted_files files.exchange_secret files.list_folders files.map_secret
files.own_process_tree files.process_tree files.read_secret files.read_secret_by_a_path_descriptor
files.read_secret_by_descriptor_walk files.read_secret_by_openat2 files.read_secret_by_relative_path
files.read_secret_through_a_hard_link files.read_secret_through_a_moved_folder
files.read_secret_through_a_symlink files.remove_secret files.replace_secret files.source_of_the_service
files.sparse_file files.system_tree files.truncate_secret files.watch_folders files.write_secret
files.write_through_a_symlink files.write_to_the_process_tree
network.listen network.netlink network.tcp_to_loopback network.tcp_without_connect network.udp
network.unix_abstract network.unix_bind_of_a_pair network.unix_connect_of_a_pair
network.unix_datagram_from_a_pair network.unix_listen network.unix_message_from_a_pair network.unix_path
others.descriptors_of_others others.kill_group others.kill_others others.kill_threads
others.leases_and_notices others.owner_of_a_descriptor others.owner_of_a_descriptor_by_kind
others.owner_of_a_socket others.owner_with_wide_arguments others.pin_others others.queue_signals
others.read_memory_of_others others.signal_of_a_descriptor others.signals_by_process_descriptor
others.slow_others others.trace_me others.write_memory_of_others
kernel.asynchronous_io kernel.calls_from_a_new_thread kernel.calls_from_a_signal_handler
kernel.clock_and_names kernel.handles kernel.io_uring kernel.join_a_namespace kernel.keys
kernel.landlock_of_its_own kernel.log_and_accounting kernel.memory_file kernel.mount kernel.namespaces
kernel.no_new_privileges kernel.own_filter kernel.performance_events kernel.personality
kernel.user_page_faults kernel.wide_numbers
floods.memory_by_map
inside.environment inside.environment_in_c
""".split()  # noqa: SIM905

# Responses that fool a grader that runs the tests in the response's process and checks its exit code.
BELIEVED_BY_EXIT_CODE = """
exit_at_once exit_of_os_at_once exit_when_called exit_of_os_when_called equal_to_everything
number_equal_to_everything text_equal_to_everything mock_of_anything raises_system_exit class_that_lies
""".split()  # noqa: SIM905


@pytest.fixture(scope="module", params=SETUPS)
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    if os.getuid() != 0 and not SETUPS[request.param].user:
        pytest.skip("only root can be root, or drop its capabilities")
    return asyncio.run(_suite(request.param)) | {"setup": request.param}


def test_nothing_gets_through(outcome: dict[str, Any]) -> None:
    assert {name: said for name, said in outcome["attacks"].items() if said} == {}
    assert outcome["tier"] == SETUPS[outcome["setup"]].tier


def test_nothing_is_harmed_or_left(outcome: dict[str, Any]) -> None:
    assert outcome["damage"] == []


def test_no_cheat_is_rewarded(outcome: dict[str, Any]) -> None:
    assert {name: said for name, said in outcome["cheats"].items() if said} == {}
    assert outcome["honest"] == {"asserts": 1.0, "calls": 1.0, "outputs": 1.0}


def test_the_suite_is_whole() -> None:
    """A family whose functions are not found would pass silently."""
    for family in FAMILIES:
        name = family.__name__.rpartition(".")[2]
        assert sum(case.name.startswith(f"{name}.") for case in CASES) >= 15
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({cheat.name for cheat in CHEATS}) == 2 * len(FUNCTIONS) + len(PROGRAMS)


@pytest.mark.parametrize(
    ("part", "wall", "noticed"),
    [
        (landlock, "system_call(_RESTRICT_SELF, self._descriptor, 0)", "read the host's files"),
        (program, "kernel.filter_system_calls(walls.filter)", "fork"),
        (program, "(resource.RLIMIT_AS, order.memory_bytes),", "memory"),
        (program, "os.closerange(len(STREAMS), 1 << 30)", "inherited descriptors"),
    ],
)
async def test_a_sandbox_with_a_wall_missing_does_not_start(
    part: ModuleType, wall: str, noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where a zygote gets its source from
    monkeypatch.setattr(part, "__file__", _without(wall, str(part.__file__), tmp_path))
    try:
        with pytest.raises(SandboxError, match=f"is not secure on this machine.*{noticed}"):
            async with start_sandbox(2, namespaces=False):
                pass
    finally:
        with suppress(FileNotFoundError):
            os.unlink("/dev/shm/atoll-attack")


async def test_without_landlock_there_is_no_sandbox() -> None:
    source = """
import asyncio, errno
from atoll.reward.sandbox.host import start_sandbox
from atoll.runtime.errors import SandboxError
from tests.sandbox.setups import refuse
refuse([444], errno.ENOSYS)
async def start():
    async with start_sandbox(1, namespaces=True):
        print("started")
try:
    asyncio.run(start())
except SandboxError as error:
    print(error)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await asyncio.wait_for(process.communicate(), 30)
    assert b"no Landlock" in stdout
    assert b"started" not in stdout


async def test_outside_a_sandbox_attacks_get_through() -> None:
    cases = {case.name: case for case in CASES}
    gate = asyncio.Semaphore(os.cpu_count() or 1)
    token = MARKER + secrets.token_hex(16)

    async def attack(name: str) -> tuple[str, str, list[str]]:
        async with gate:
            with targets(token, USER) as made, TemporaryDirectory() as folder:
                stdin = made.described([made.victim.pid])
                said = await _outside(cases[name].source, stdin, folder, token)
                if name == "others.kill_others":  # a killed process ends when it is next scheduled
                    await asyncio.to_thread(made.victim.wait, 20)
                return name, said, made.damage()

    came = await asyncio.gather(*(attack(name) for name in OUTSIDE))
    assert [(name, said) for name, said, _ in came if "ESCAPED" not in said] == []
    damage = {name: found for name, _, found in came}
    assert damage["network.udp"] == ["udp was reached"]
    assert damage["network.unix_message_from_a_pair"] == ["datagram was reached"]
    assert damage["files.write_secret"] == []  # opened, but not written
    assert damage["files.truncate_secret"] == ["the secret file was changed"]
    assert damage["files.create_beside_secret"] == ["files were left: {'atoll-attack'}"]
    assert damage["others.kill_others"] == ["the other process was ended: -9"]
    assert damage["others.slow_others"] == ["the other process was slowed"]
    said = {name: text for name, text, _ in came}
    assert token in said["files.read_secret"]
    assert token in said["inside.environment"]


async def test_a_grader_that_asks_for_the_exit_code_believes_cheats(tmp_path: Path) -> None:
    """This shows that these responses are real cheats."""
    for name in BELIEVED_BY_EXIT_CODE:
        source = f"{FUNCTIONS[name]}\n{ASSERTS['test']}\ncheck(double)\n"
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", source, cwd=tmp_path)
        assert await asyncio.wait_for(process.wait(), 10) == 0, name


def _without(wall: str, path: str, folder: Path) -> str:
    """A copy of the file without one statement or element."""
    source = Path(path).read_text()
    assert source.count(wall) == 1
    copy = folder / "copy.py"
    copy.write_text(source.replace(wall, "" if wall.endswith(",") else "pass"))
    return str(copy)


async def _suite(setup: str) -> dict[str, Any]:
    environment = os.environ | {"ATOLL_TOKEN": MARKER + secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    enter = (sys.executable, "-m", "tests.sandbox.setups", setup)
    process = await asyncio.create_subprocess_exec(
        *enter, sys.executable, "-m", "tests.sandbox.suite", setup,
        cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, _ = await asyncio.wait_for(process.communicate(), SUITE_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(stdout)
    return found


async def _outside(source: str, stdin: bytes, folder: str, token: str) -> str:
    """The output of an attack that runs as an ordinary user, in its own session."""
    os.chmod(folder, 0o777)
    process = await asyncio.create_subprocess_exec(
        sys.executable, ROOT / "tests/sandbox/setups.py", "user", sys.executable, "-I", "-c", source,
        cwd=folder, env={"ATOLL_TOKEN": token}, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        stdout, _ = await asyncio.wait_for(process.communicate(stdin), 20)
    finally:
        if process.returncode is None:
            process.kill()
    return stdout.decode(errors="replace")
