"""Whole runs of each kind of agent, with real servers in processes of their own, of which each hangs once and
dies once in mid-episode, in different steps: a process that dies ends a call that hangs. What the policy says
is scripted."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.launch.launcher import Follow, launch
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import dumps, read_dump
from atoll.wire.types import ExternalServer, Trajectory
from tests.builders import run_config
from tests.gateway import agent_runs
from tests.gateway.exactness import until_ended

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / ".venv-servers/bin/python"
TOKEN = "sesame-4711"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
FAIL = '<tool_call>\n{"name": "fail_once", "arguments": {"how": "%s"}}\n</tool_call>'


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def one_server(script: str, folder: Path) -> Iterator[Served]:
    command = [THEIRS, ROOT / "tests/servers" / f"{script}.py", "0", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Served(process, f"http://127.0.0.1:{int(process.stdout.readline())}")
        process.kill()


@contextmanager
def kept_alive(script: str, folder: Path, python: Path | str = THEIRS) -> Iterator[int]:
    """The port of a server that is started again there whenever its process ends."""
    faults = folder / script
    faults.mkdir()
    is_over = threading.Event()

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        command = [python, ROOT / "tests/servers" / f"{script}.py", str(port), faults]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    running, port = start(0)

    def keep() -> None:
        nonlocal running
        while running.wait() is not None and not is_over.is_set():
            running, _ = start(port)

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield port
    finally:
        is_over.set()
        running.kill()
        keeper.join()
    assert sorted(path.name for path in faults.iterdir()) == ["die", "hang"]  # each happened


def server(kind: str, name: str, url: str, protocol: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "url": url, "protocol": protocol, "timeout_s": 3.0}


def train(
    folder: Path,
    agent: dict[str, Any],
    scripts: list[list[str]],
    row: dict[str, Any] | None = None,
    follow: Follow = until_ended,
    steps: int = 1,
    **tables: Any,
) -> list[Trajectory]:
    """`steps`, each on as many of the scripts, in order; their samples. `row`: other fields of all rows."""
    agent_runs.write_rows(folder / "rows.jsonl", scripts, **(row or {}))
    tree = agent_runs.config(folder, "qwen2.5", "openai_chat", **tables)
    tree["run"]["steps"] = steps
    tree["agents"] = [{"name": "tested", **agent}]
    tree["data"]["shuffle"] = False
    tree["coordinator"] |= {"prompts_per_step": len(scripts) // steps, "max_sample_attempts": 10}
    config = run_config(tree)
    assert launch(config, follow, resume=False)
    read = [read_dump(dump)[1] for dump in dumps(config.folder / "dumps")]
    samples = [sample for groups in read for group in groups for sample in group.samples]
    samples.sort(key=lambda sample: sample.id)
    assert len(samples) == 2 * len(scripts)
    return samples


def lost(folder: Path, row: int) -> str:
    """What the coordinator's log says of a row's attempts that were lost."""
    lines = (folder / "runs/agents/logs/coordinator.log").read_text().splitlines()
    return "\n".join(line for line in lines if f"sample agents/0/{row}/" in line and ", attempt " in line)


def replies(sample: Trajectory) -> list[str]:
    return [message.content for message in sample.messages if message.role == "tool"]


@pytest.mark.long
def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    scripts = [[ADD, "46"], [ADD, FAIL % "hang", "46"], [ADD, FAIL % "die", "46"], [ADD + ADD, "47"]]
    with kept_alive("mcp_sums", tmp_path) as port:
        samples = train(
            tmp_path,
            {"tools": {"servers": ["sums"]}},
            scripts,
            steps=2,
            servers=[server("tool", "sums", f"http://127.0.0.1:{port}/mcp", "mcp")],
        )
    assert [sample.score for sample in samples] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert [replies(sample) for sample in samples[::2]] == [
        ["46"],
        ["46", "well again"],
        ["46", "well again"],
        ["46", "46"],
    ]
    cause = f"environment failed: EnvironmentFailedError: tool server sums at http://127.0.0.1:{port}/mcp: "
    assert f"{cause}no answer within 3 s" in lost(tmp_path, 1)
    assert f"{cause}got " in lost(tmp_path, 2)
    assert "the connection failed" in lost(tmp_path, 2)


@pytest.mark.long
def test_an_openenv_environment(tmp_path: Path) -> None:
    scripts = [["a", "b", "c"], ["a", "hang", "c"], ["a", "die", "c"], ["a"]]
    with kept_alive("openenv_steps", tmp_path) as port:
        samples = train(
            tmp_path,
            {"environment": {"server": "steps"}},
            scripts,
            steps=2,
            servers=[server("env", "steps", f"http://127.0.0.1:{port}", "openenv")],
        )
    for sample in samples:
        assert [(reward.node, reward.value) for reward in sample.rewards] == [
            (sample.turns[0].node, 0.25),
            (sample.turns[1].node, 0.25),
            (sample.turns[2].node, 0.5),
        ]
        asked = [message.content for message in sample.messages if message.role == "user"]
        assert asked[0].endswith("\nbegin at ")
        assert asked[1:] == ["step 1", "step 2"]
    cause = f"environment failed: EnvironmentFailedError: env server steps at http://127.0.0.1:{port}: "
    assert f"{cause}no answer within 3 s" in lost(tmp_path, 1)
    assert f"{cause}step: the connection ended" in lost(tmp_path, 2)


@pytest.mark.long
def test_servers_that_are_registered_while_the_run_goes_on(tmp_path: Path) -> None:
    """The first one takes one episode at a time, and leaves after the first step."""
    with one_server("openenv_steps", tmp_path) as first, one_server("openenv_steps", tmp_path) as second:

        async def follow(client: CoordinatorClient) -> None:
            status = await client.status()
            while not status.error.startswith("waiting for external servers: env steps; register each"):
                status = await client.status(status.revision)
            await client.add_server(ExternalServer("env", "steps", first.url, "openenv", concurrency=1))
            while status.step < 1:
                status = await client.status(status.revision)
            await client.add_server(ExternalServer("env", "steps", second.url, "openenv"))
            assert await client.remove_server("env", "steps", first.url) == 1
            first.process.kill()
            await until_ended(client)

        agent = {"environment": {"server": "steps"}}
        samples = train(tmp_path, agent, [["a", "b", "c"]] * 12, follow=follow, steps=3)
    assert [sample.score for sample in samples] == [1.0] * 24


@pytest.mark.long
def test_an_agent_called_by_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)
    scripts = [["a", "46"], ["hang", "46"], ["die", "46"], ["a", "47"]]
    with kept_alive("http_agent", tmp_path, sys.executable) as port:
        agent = {"http": {"url": f"http://127.0.0.1:{port}/solve", "auth": "env:AGENT_TOKEN"}}
        ends = {"max_seconds": 20.0, "on_end": {"seconds": "replace"}, "reward": "session"}
        samples = train(tmp_path, agent | ends, scripts, steps=2)
    assert [sample.score for sample in samples] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert [dict(sample.environment) for sample in samples[::2]] == [{"last": "46"}] * 3 + [{"last": "47"}]
    assert ", attempt 0: seconds" in lost(tmp_path, 1)
    assert ", attempt 0: agent failed: " in lost(tmp_path, 2)


SUMS = "def add(a, b):\n    return a - b\n"
TEST = """import unittest, sums
class Test(unittest.TestCase):
    def test_add(self): self.assertEqual(sums.add(2, 3), 5)
"""


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_functions_in_the_sandbox_edit_files_that_a_grader_reads(tmp_path: Path) -> None:
    mended = called("write_file", path="sums.py", text=SUMS.replace("-", "+"))
    broken = called("write_file", path="sums.py", text="def add(a, b): return 5\n")
    functions = [f"{ROOT}/examples/coding.py:{name}" for name in ("read_file", "write_file", "run_tests")]
    samples = train(
        tmp_path,
        {"tools": {"functions": functions}},
        [
            [called("run_tests"), called("read_file", path="sums.py"), mended, called("run_tests"), "Done."],
            [broken, called("run_tests"), called("read_file", path="nothing"), "Done."],
        ],
        row={
            "truth": ["assert add(2, 3) == 5", "assert add(2, 4) == 6"],
            "files": {"sums.py": SUMS, "test_sums.py": TEST},
        },
        reward={"graders": [{"name": "code", "file": "sums.py"}], "sandbox": {}},
    )
    assert [sample.score for sample in samples] == [1, 1, 0, 0]
    seen, cheated = replies(samples[0]), replies(samples[2])
    assert "FAILED (failures=1)" in seen[0]
    assert seen[1] == SUMS
    assert seen[3].endswith("OK\n")
    assert cheated[1].endswith("OK\n")
    assert cheated[2].startswith("error: FileNotFoundError")
    assert samples[0].environment["sums.py"] == SUMS.replace("-", "+")


ENVIRONMENT = """
from pathlib import Path

class Countdown:
    def __init__(self):
        self.left = 0

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return f"{self.left} left, seed {seed}", {}

    def step(self, action):
        if action == "fail" and not Path("failed").exists():
            Path("failed").touch()
            raise OSError("the world ended")
        self.left -= 1
        return f"{self.left} left", 0.5 * (action == "down"), self.left == 0, False, {}
"""


def test_a_class_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    samples = train(
        tmp_path,
        {"environment": {"environment": "mine.py:Countdown"}, "max_turns": 2},
        [["down", "up"], ["down", "fail", "down"]],
    )
    assert [sample.score for sample in samples] == [0.5] * 4
    assert [len(sample.turns) for sample in samples] == [2] * 4
    assert all(sample.reason == "turns" for sample in samples)
    asked = [[m.content.partition("\n")[2] for m in sample.messages[:1]] for sample in samples]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
    assert "environment failed: EnvironmentFailedError: Countdown: OSError: the world ended" in lost(
        tmp_path, 1
    )
