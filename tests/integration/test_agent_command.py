"""Commands as agents: what a program is given, its limits, and that nothing of it is left."""

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.agents import workspace
from atoll.agents.command import CommandFailedError, command_agent
from atoll.agents.session import AgentSession
from atoll.config.errors import ConfigError
from atoll.config.load import PLAIN_VARIABLES
from atoll.config.schema import CommandConfig
from atoll.wire.types import AgentTask, GroupId, Message, SampleId, SessionId

HANG_S = 60
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sessions have their folders; none is left there."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def session(text: str = "1+1=", **extra: str) -> AgentSession:
    return AgentSession(
        AgentTask(
            session=SessionId(SampleId(GroupId("toy", 0, 7), 0), 0),
            agent="mine",
            url="http://gateway:1",
            agent_key="agent-key",
            reward_key="reward-key",
            model="toy",
            messages=(Message("system", "add"), Message("user", "0"), Message("user", text)),
            ground_truth="2",
            data_source="sums",
            extra=extra,
        )
    )


async def run(own: AgentSession, *command: str, **settings: Any) -> dict[str, str]:
    """Files that the command leaves for graders."""
    async with asyncio.timeout(HANG_S):
        result = await command_agent(CommandConfig(command=command, **settings))(own)
    assert result is None
    return own.environment


async def run_shell(script: str, **settings: Any) -> dict[str, str]:
    return await run(session(), "sh", "-c", script, **settings)


async def told(fifo: Path) -> list[str]:
    """Words of the line that a program writes."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.open(fifo, os.O_RDWR), "rb")
    )
    async with asyncio.timeout(HANG_S):
        line = await reader.readline()
    transport.close()
    return line.decode().split()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_program_finds_the_policy_in_its_environment_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for secret in ("ATOLL_TOKEN", "ATOLL_OPERATOR_TOKEN", "WANDB_API_KEY", "HTTP_PROXY"):
        monkeypatch.setenv(secret, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    script = "import json, os; json.dump({**os.environ, 'cwd': os.getcwd()}, open('found.json', 'w'))"
    files = await run(
        session(), sys.executable, "-c", script, files=["*.json"], env={"MODE": "fast", "OPENAI_MODEL": "own"}
    )
    found = json.loads(files["found.json"])
    folder = Path(found.pop("cwd")).parent
    inherited = {name: value for name, value in os.environ.items() if name in PLAIN_VARIABLES}
    locale = {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    assert found == {
        **inherited,
        **locale,
        "OPENAI_BASE_URL": "http://gateway:1/v1",
        "OPENAI_API_BASE": "http://gateway:1/v1",
        "OPENAI_API_KEY": "agent-key",
        "OPENAI_MODEL": "own",
        "ANTHROPIC_BASE_URL": "http://gateway:1",
        "ANTHROPIC_API_KEY": "agent-key",
        "ANTHROPIC_MODEL": "toy",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "ATOLL_SESSION": "toy/0/7/0/0",
        "ATOLL_TASK_FILE": str(folder / "task.md"),
        "MODE": "fast",
    }


async def test_the_task_is_the_last_user_message_on_stdin_and_in_a_file() -> None:
    script = 'cat > stdin; cp "$ATOLL_TASK_FILE" file'
    files = await run(session("é\r\n2+2="), "sh", "-c", script, files=["*"])
    assert files == {"stdin": "é\r\n2+2=", "file": "é\r\n2+2="}


async def test_a_task_among_the_arguments_is_not_on_stdin_too() -> None:
    script = 'cat > stdin; printf %s "$1" > argument'
    files = await run(session("$(ls) '"), "sh", "-c", script, "sh", "Q: {task}", files=["*"])
    assert files == {"stdin": "", "argument": "Q: $(ls) '"}


async def test_a_row_without_a_user_message_is_refused() -> None:
    own = session()
    own.messages = [{"role": "system", "content": "add"}]
    with pytest.raises(ValueError, match="the row has no user message"):
        await run(own, "true")


async def test_each_session_has_a_workspace_of_its_own(tmp_path: Path) -> None:
    template = tmp_path / "template"
    (template / "src").mkdir(parents=True)
    (template / "src" / "sum.py").write_text("broken")
    (template / "README").write_text("read me")
    script = "echo $1 >> src/sum.py; echo $1 > ~/state; cat ~/state src/sum.py > all; ls -A .. ~ > names"
    own = [session(files=json.dumps({"src/sum.py": f"{n}\n", "tests/new.py": "new"})) for n in range(4)]
    agent = command_agent(
        CommandConfig(
            command=("sh", "-c", script, "sh", "{task}"), workspace=template, files=("*", "tests/*")
        )
    )
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(agent(each) for each in own))
    for n, each in enumerate(own):
        names = each.environment.pop("names").split()
        assert each.environment == {"README": "read me", "all": f"1+1=\n{n}\n1+1=\n", "tests/new.py": "new"}
        assert names[:5] == ["..:", "home", "task.md", "tmp", "workspace"]
        assert names[-1] == "state"
    assert (template / "src" / "sum.py").read_text() == "broken"


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "away/out", ""])
async def test_files_of_a_row_stay_in_the_workspace(tmp_path: Path, path: str) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "away").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=f"got '{path}', expected a path inside the workspace"):
        await run(session(files=json.dumps({path: ""})), "true", workspace=template)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", ["[]", '{"a": 1}'])
async def test_files_of_a_row_are_texts_by_path(files: str) -> None:
    with pytest.raises(ValueError, match="expected a JSON object of path to text"):
        await run(session(files=files), "true")


async def test_graders_get_text_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workspace, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(workspace, "MAX_BYTES", 250)
    (tmp_path / "secret.py").write_text("secret")
    script = f"""
        mkdir -p a/b; ln -s {tmp_path} out; ln -s {tmp_path}/secret.py link.py; ln -s . loop; mkfifo pipe.py
        printf deep > a/b/deep.py; printf '\\377' > binary.py; printf other > other.txt; printf h > .hidden.py
        head -c 101 /dev/zero > large.py; for n in 1 2 3; do head -c 100 /dev/zero > zeros$n.py; done
    """
    files = await run_shell(script, files=["**/*.py", "out/*", "*.py"])
    expected = {".hidden.py": "h", "a/b/deep.py": "deep", "zeros1.py": "\0" * 100, "zeros2.py": "\0" * 100}
    assert files == expected
    assert "graders do not get 3 files" in caplog.text


async def test_graders_get_a_bounded_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_FILES", 2)
    assert await run_shell("touch c a b", files=["*"]) == {"a": "", "b": ""}


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo out; echo err >&2; exit 3", "the command ended with exit code 3; its last output: out\nerr"),
        ("kill -SEGV $$", "the command was ended by SIGSEGV; its last output: "),
        ("kill -9 $PPID; sleep 60", "the command's supervisor was killed; its last output: "),
        ("exec dd if=/dev/zero of=big bs=1M count=2 status=none", "the command was ended by SIGXFSZ; "),
        ("while :; do :; done", "the command was ended by SIGXCPU; "),
    ],
)
async def test_a_program_that_fails_is_a_failure_with_its_output(script: str, problem: str) -> None:
    with pytest.raises(CommandFailedError) as failure:
        await run_shell(script, file_mb=1, cpu_s=1)
    assert str(failure.value).startswith(problem)


async def test_a_program_has_no_more_memory_than_it_may() -> None:
    script = "b'x' * (100 << 20)"
    await run(session(), sys.executable, "-c", script, memory_mb=200)
    with pytest.raises(CommandFailedError, match=r"exit code 1; its last output: [^$]*MemoryError"):
        await run(session(), sys.executable, "-c", script, memory_mb=100)


async def test_a_program_that_is_not_there_fails() -> None:
    with pytest.raises(CommandFailedError, match=r"exit code 127; .*\./solve: No such file or directory"):
        await run(session(), "./solve")


async def test_a_flood_of_output_is_read_and_its_end_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CommandFailedError) as failure:
        await run_shell("head -c 50M /dev/zero | tr '\\0' x; printf end; exit 1", output_kb=2)
    assert str(failure.value).endswith("x" * 297 + "end")
    (record,) = caplog.records
    assert record.getMessage().endswith("output:\n" + "x" * 2045 + "end")


async def test_output_of_a_program_that_succeeds_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "atoll")
    await run_shell("echo fine; exec >&- 2>&-; exit 0")
    assert caplog.records == []


LEFTOVERS = """
    trap '' TERM
    sleep 1000 & echo $! > pids
    setsid sh -c 'sleep 1000 & echo $! >> pids; trap "" TERM HUP; sleep 1000 & echo $! >> pids' &
    while [ $(wc -l < pids) -lt 3 ]; do sleep 0.01; done
"""


async def test_nothing_that_a_program_starts_is_left() -> None:
    files = await run_shell(LEFTOVERS, files=["pids"])
    pids = [int(pid) for pid in files["pids"].split()]
    assert len(pids) == 3
    assert not any(map(is_running, pids))


async def test_a_program_is_asked_to_end_before_it_is_killed(fifo: Path) -> None:
    script = f"trap 'echo bye > note; exit 0' TERM; echo $$ > {fifo}; sleep 1000 & wait"
    own = session()
    running = asyncio.create_task(run(own, "sh", "-c", script, files=["note"]))
    await told(fifo)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert own.environment == {"note": "bye\n"}


async def test_cancelled_sessions_leave_nothing_and_graders_get_their_files(fifo: Path) -> None:
    own = session()
    script = f"{LEFTOVERS}\necho $(cat pids) > {fifo}; kill $PPID; sleep 1000; sleep 1000"
    running = asyncio.create_task(run(own, "sh", "-c", script, files=["pids"]))
    pids = [int(pid) for pid in await told(fifo)]
    assert all(map(is_running, pids))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(is_running, pids))
    assert own.environment["pids"].split() == list(map(str, pids))


async def test_a_session_that_is_cancelled_as_it_begins_leaves_nothing(tmp_path: Path) -> None:
    for number in range(3):
        running = asyncio.create_task(run_shell("sleep 1000", workspace=tmp_path / "sessions"))
        for _ in range(number):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_nothing_is_left_of_an_agents_process_that_is_killed(temporary: Path, fifo: Path) -> None:
    program = f"""
import asyncio, tempfile
from tests.integration.test_agent_command import CommandConfig, LEFTOVERS, command_agent, session
tempfile.tempdir = {str(temporary)!r}
script = LEFTOVERS + "echo $(cat pids) $PPID > {fifo}; sleep 1000"
asyncio.run(command_agent(CommandConfig(command=("sh", "-c", script)))(session()))
"""
    agents = psutil.Popen([sys.executable, "-c", program], cwd=ROOT)
    pids = [int(pid) for pid in await told(fifo)]
    processes = [psutil.Process(pid) for pid in pids]
    agents.send_signal(signal.SIGKILL)
    agents.wait()
    assert psutil.wait_procs(processes, timeout=HANG_S)[1] == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": ["no-such-agent"]}, "there is no program 'no-such-agent' in PATH"),
        ({"command": ["true"], "env": {"PATH": "/nowhere"}}, "there is no program 'true' in PATH"),
        ({"command": ["true"], "workspace": "/nowhere"}, "workspace = '/nowhere': expected a folder"),
        ({"command": ["true"], "files": ["../*"]}, r"got '../\*', expected a path inside the workspace"),
    ],
)
def test_what_cannot_run_is_refused_at_once(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        command_agent(CommandConfig(**settings))
