"""Each finding's threshold and advice."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cli import doctor, doctor_sandbox
from atoll.cli.doctor import GIB, FindingState
from atoll.reward.sandbox import host
from atoll.runtime.errors import SandboxError
from tests.gateway.model_folders import make_folder


def test_one_core_is_a_warning() -> None:
    assert doctor.cores(1).state is FindingState.WARNING
    assert doctor.cores(2).state is FindingState.OK


def test_little_memory_is_a_warning() -> None:
    assert doctor.memory(4 * GIB - 1).state is FindingState.WARNING
    assert doctor.memory(4 * GIB).state is FindingState.OK


def test_shared_memory_must_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory().state is FindingState.OK

    def refuse(name: str) -> int:
        raise PermissionError("seccomp says no")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = doctor.shared_memory()
    assert (finding.found, finding.state) == ("seccomp says no", FindingState.MISSING)


@pytest.mark.parametrize(
    ("version", "state", "found"),
    [
        ("2.13.0+cpu", FindingState.OK, "2.13.0+cpu"),
        ("2.9.1", FindingState.MISSING, "2.9.1, but ==2.13.0 is needed"),
    ],
)
def test_a_package_must_fit(
    monkeypatch: pytest.MonkeyPatch, version: str, state: FindingState, found: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch==2.13.0; extra == 'cpu'"])
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    (finding,) = doctor.packages()
    assert (finding.what, finding.found, finding.state) == ("torch", found, state)


def test_an_environment_with_cupy_is_a_trainers_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch==2.13.0; extra == 'cpu'", "torch==2.14.1; extra == 'trainer'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.14.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "cupy")
    (finding,) = doctor.packages()
    assert (finding.found, finding.state) == ("2.14.1", FindingState.OK)


def test_a_package_that_is_not_installed_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["no-such-package>=1"])
    (finding,) = doctor.packages()
    assert finding.state is FindingState.MISSING
    assert finding.advice == "pip install --editable '.[cpu]'"


@pytest.mark.parametrize(
    ("engine", "python", "state", "found"),
    [
        ("local", sys.executable, FindingState.OK, f"{sys.executable} imports torch"),
        ("sglang", sys.executable, FindingState.MISSING, "ModuleNotFoundError: No module named 'sglang'"),
        ("sglang", "no/such/python", FindingState.MISSING, "No such file or directory: 'no/such/python'"),
    ],
)
def test_the_engine_is_looked_for_in_the_replicas_environment(
    tmp_path: Path, engine: str, python: str, state: FindingState, found: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f"""run = {{ name = "toy", steps = 1 }}
model.path = "model"
data.train = [{{ path = "rows.jsonl" }}]
rollout = {{ engine = "{engine}", python = "{python}" }}
"""
    )
    finding = doctor.rollout_environment(config)
    assert (finding.what, finding.state) == (f"engine {engine}", state)
    assert finding.found.endswith(found)


@pytest.mark.parametrize(
    ("tier", "state", "found", "advice"),
    [
        ("landlock, seccomp, namespaces", FindingState.OK, "landlock, seccomp, namespaces", ""),
        (
            "landlock, seccomp",
            FindingState.WARNING,
            "landlock, seccomp; no namespaces: unshare: not permitted",
            "programs have no writable folder; if they need one:\nallow user namespaces on this machine",
        ),
        (
            SandboxError("fork got through"),
            FindingState.WARNING,
            "fork got through",
            "needed only by the graders code",
        ),
    ],
)
async def test_the_sandbox_is_started(
    monkeypatch: pytest.MonkeyPatch, tier: str | SandboxError, state: FindingState, found: str, advice: str
) -> None:
    @asynccontextmanager
    async def start(programs: int, namespaces: bool) -> AsyncIterator[SimpleNamespace]:
        if isinstance(tier, SandboxError):
            raise tier
        yield SimpleNamespace(tier=tier, refusal="unshare: not permitted")

    monkeypatch.setattr(host, "start_sandbox", start)
    monkeypatch.setattr(doctor_sandbox, "remedies", lambda _: iter(()))
    finding = await doctor.sandbox()
    assert (finding.found, finding.state) == (found, state)
    assert advice in finding.advice


def test_a_runs_folder_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.runs_folder(tmp_path / "runs").found.startswith(f"{tmp_path / 'runs'}, ")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    finding = doctor.runs_folder(tmp_path)
    owner = tmp_path.stat().st_uid
    assert finding.found == f"{tmp_path} is not writable for user 10001: it belongs to user {owner}"
    assert f"chown 10001 {tmp_path}" in finding.advice
    assert finding.state is FindingState.MISSING
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    finding = doctor.runs_folder(tmp_path)
    assert finding.found == f"{tmp_path} is not writable: its file system is read-only"
    assert finding.advice.endswith("in a container, mount a volume on it")


def test_the_chat_format_of_a_runs_model_is_described(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", "qwen3", tiny=True)
    text = Path("examples/arithmetic.toml").read_text()
    assert "runs/data/arithmetic/model" in text
    config = tmp_path / "run.toml"
    config.write_text(text.replace("runs/data/arithmetic/model", str(model)))
    findings = list(doctor.chat_templates(config))
    assert [finding.found for finding in findings] == [
        "extend a branch: tool results, system messages",
        'extend a branch if thinking = "keep", open one after thinking if it is "template": '
        "user messages, tool results before a user message, fabricated exchanges",
        "format of tool calls: hermes",
    ]
    assert {finding.state for finding in findings} == {FindingState.OK}

    config.write_text(text.replace("runs/data/arithmetic/model", str(tmp_path / "none")))
    (finding,) = doctor.chat_templates(config)
    assert (finding.state, finding.advice) == (FindingState.WARNING, "only agents need it")
    assert "config.json: missing" in finding.found
