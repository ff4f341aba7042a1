"""What ends the start of a run is found before a service starts."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.launch import preflight
from atoll.cli.launch.findings import FindingState
from atoll.config.schema import RunConfig
from atoll.runtime.errors import UserError
from tests.builders import run_config

Tree = dict[str, Any]


@pytest.fixture
def model(tiny_qwen2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen2, tmp_path / "model"))


@pytest.fixture
def run_of(model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run that can start, but for the sections given."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}\n')
    good = {
        "run": {"dir": tmp_path / "runs"},
        "model": {"path": model},
        "data": {"train": [{"path": tmp_path / "rows.jsonl"}]},
    }
    return lambda **sections: run_config(good, sections)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and users' functions are there: looking for them takes a process each."""
    monkeypatch.setattr(preflight, "_run", lambda *_: "")


def problems(config: RunConfig, *, resume: bool = False) -> dict[str, str]:
    found = preflight.examine(config, resume=resume)
    return {finding.what: finding.found for finding in found if finding.state is FindingState.MISSING}


def test_a_run_that_can_start(run_of: Callable[..., RunConfig], tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    config = run_of(validation={"sets": [{"name": "sums", "path": rows}]}, algorithm={"kl": {}})
    findings = list(preflight.examine(config, resume=False))
    assert {finding.state for finding in findings} == {FindingState.OK}
    assert [finding.what for finding in findings] == [
        "loopback",
        "run folder",
        "coordinator.port",
        "rollout.python",
        "trainer packages",
        "actor model",
        "reference model",
        "tokenizer",
        f"data.train {rows}",
        f"validation.sets {rows}",
    ]
    assert [finding.found for finding in findings[5:]] == [
        f"{model}, 27 tensors",  # 12 per layer: 4 matrices, 3 biases, 3 of the MLP, 2 norms; 3 beside them
        f"{model}, 27 tensors",
        f"{model}, no chat template",
        "2 rows read",
        "2 rows read",
    ]
    assert not (tmp_path / "runs").exists()


def test_the_checks_do_not_load_torch() -> None:
    script = "import sys, atoll.cli.launch.preflight; assert not {'torch', 'megatron'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def add_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )


MODELS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "actor model", "is not a model folder: no config.json"),
    "no weights": (
        lambda m: (m / "model.safetensors").unlink(),
        "actor model",
        "has no weights: model.safetensors",
    ),
    "no shard": (add_index, "actor model", "has no weights: model-00002-of-00002.safetensors is missing"),
    "cut": (lambda m: truncate(m / "model.safetensors"), "actor model", "is not a safetensors file"),
    "other shapes": (
        lambda m: change_config(m, num_hidden_layers=3),
        "actor model",
        "lacks tensor model.layers.2.",
    ),
    "GPT-2": (
        lambda m: change_config(m, architectures=["GPT2LMHeadModel"]),
        "actor model",
        "architectures is ['GPT2LMHeadModel'], expected one of",
    ),
    "positions": (
        lambda m: change_config(m, max_position_embeddings=1024),
        "actor model",
        "rollout.local.max_length = 2048, but",
    ),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json: missing"),
    "template": (
        lambda m: (m / "chat_template.jinja").write_text("\n{% if %}"),
        "tokenizer",
        "line 2 of the chat template is not valid Jinja: Expected an expression",
    ),
    "refusing template": (
        lambda m: (m / "chat_template.jinja").write_text("{{ raise_exception('no') }}"),
        "data.train",
        "row 0 (the first is 0): field prompt: the chat template refuses the messages: no",
    ),
}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("case", MODELS)
def test_a_model_folder_that_does_not_do(run_of: Callable[..., RunConfig], model: Path, case: str) -> None:
    spoil, what, message = MODELS[case]
    spoil(model)
    [(found, problem)] = problems(run_of(rollout={"local": {"max_length": 2048}})).items()
    assert found.startswith(what)
    assert message in problem


SETTINGS: dict[str, tuple[Tree, str, str]] = {
    "router replay of a dense model": (
        {"trainer": {"router_replay": True}},
        "actor model",
        "model is a dense model, which has no experts: remove it",
    ),
    "hub": (
        {"model": {"path": "Qwen/Qwen2.5-0.5B"}},
        "actor model",
        "  hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B\n"
        "or, from ModelScope,\n"
        "  modelscope download --model Qwen/Qwen2.5-0.5B --local_dir models/Qwen2.5-0.5B\n"
        'and set path = "models/Qwen2.5-0.5B"',
    ),
    "reference": (
        {"algorithm": {"kl": {}}, "reference": {"path": "no/where"}},
        "reference model",
        "no/where is not a model folder",
    ),
    "critic": (
        {"algorithm": {"advantage": "gae"}, "critic": {"path": "no/where"}},
        "critic model",
        "no/where is not a model folder",
    ),
    "policy as reward model": (
        {"reward_model": {"path": "{model}"}},
        "reward_model model",
        "architectures is ['Qwen2ForCausalLM'], expected one of ['LlamaForSequenceClassification'",
    ),
    "layout": (
        {"trainer": {"parallel": {"tensor": 4}}},
        "actor model",
        "trainer.parallel.tensor = 4 does not divide the model's num_key_value_heads = 2",
    ),
    "adapter": (
        {"trainer": {"lora": {"path": "no/where"}}},
        "trainer.lora.path",
        "no/where holds no adapter of peft",
    ),
    "data": ({"data": {"train": [{"path": "absent.jsonl"}]}}, "data.train absent.jsonl", "no such dataset"),
    "address": (
        {"coordinator": {"host": "192.0.2.1"}},  # kept for documentation, so nobody's
        "coordinator.port",
        "coordinator cannot listen on 192.0.2.1:0: Cannot assign requested address",
    ),
    "store": (
        {"store": {"url": "redis://127.0.0.1:9"}},
        "store.url",
        "is it running, and is store.url correct?",
    ),
    "store's URL": ({"store": {"url": "http://x"}}, "store.url", "expected redis://"),
    "interpreter": ({"rollout": {"python": "no/python"}}, "rollout.python", "no/python is not an executable"),
    "secret": (
        {
            "servers": [
                {
                    "kind": "tool",
                    "name": "t",
                    "url": "http://x",
                    "protocol": "mcp",
                    "auth": "env:NOT_SET_HERE",
                }
            ]
        },
        "servers t",
        "the environment variable NOT_SET_HERE is not set",
    ),
    "length": (
        {"rollout": {"local": {"max_length": 4}, "sampling": {"max_new_tokens": 1}}},
        "data.train",
        "got 4 tokens (the longest of 2 over-long rows), expected at most rollout.local.max_length - 1 = 3",
    ),
}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_does_not_do(run_of: Callable[..., RunConfig], model: Path, case: str) -> None:
    tree, what, message = SETTINGS[case]
    if case == "policy as reward model":
        tree = {"reward_model": {"path": model}}
    [(found, problem)] = problems(run_of(**tree)).items()
    assert found.startswith(what)
    assert message in problem


@pytest.mark.usefixtures("no_processes")
def test_a_folder_that_cannot_hold_the_run(
    run_of: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    config = run_of(run={"dir": tmp_path / "file"})
    assert problems(config)["run folder"].startswith(
        f"{tmp_path / 'file'} is not a folder: the run writes to "
    )
    config = run_of()
    config.folder.mkdir(parents=True)
    (config.folder / "metrics.jsonl").write_text("{}\n")
    assert "already contains a run" in problems(config)["run folder"]
    assert problems(config, resume=True) == {}
    monkeypatch.setattr(os, "access", lambda path, mode: path != config.folder)  # whoever runs this test
    assert "is not writable" in problems(config, resume=True)["run folder"]


@pytest.mark.usefixtures("no_processes")
def test_ports_that_are_taken(run_of: Callable[..., RunConfig], tmp_path: Path) -> None:
    agent = {"name": "mine", "function": "examples/agents.py:calculator"}
    train = [{"path": tmp_path / "rows.jsonl", "agent": "mine"}]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = run_of(
            coordinator={"port": port}, gateway={"port": port}, agents=[agent], data={"train": train}
        )
        assert problems(config).keys() == {"coordinator.port", "gateway.port"}
    assert problems(config) == {}


@pytest.mark.usefixtures("no_processes")
def test_without_a_loopback_device(run_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `unshare -n` leaves."""

    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        UserError, match=r"loopback: .*Cannot assign requested address; bring the loopback device up"
    ):
        preflight.require(run_of(), resume=False)


def test_packages_and_functions_are_looked_for_in_their_processes(
    run_of: Callable[..., RunConfig], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import not_installed\n\n\ndef right(item):\n    return 1.0\n\n\nasync def act(session):\n    pass\n"
    )
    config = run_of(
        reward={"graders": [f"{mine}:right"]},
        agents=[{"name": "mine", "function": f"{mine}:act"}],
        data={"train": [{"path": tmp_path / "rows.jsonl", "agent": "mine"}]},
        rollout={"engine": "sglang", "python": sys.executable},
    )
    cause = f"{mine} cannot be imported: ModuleNotFoundError: No module named 'not_installed'"
    assert problems(config) == {
        "own functions": cause,
        "agent mine": cause,
        "rollout.python": f"{sys.executable} cannot import sglang; install it there, or set rollout.python",
    }


@pytest.mark.usefixtures("no_processes")
def test_everything_that_is_wrong_is_said_at_once(run_of: Callable[..., RunConfig], tmp_path: Path) -> None:
    train = [
        {"path": "absent.jsonl"},
        {"path": tmp_path / "rows.jsonl"},
        {"path": f"{tmp_path / 'mine.py'}:rows"},
    ]
    (tmp_path / "mine.py").write_text("def rows():\n    yield {}\n")
    config = run_of(model={"path": tmp_path / "nowhere"}, data={"train": train})
    with pytest.raises(UserError) as raised:
        preflight.require(config, resume=False)
    first, *lines = str(raised.value).splitlines()
    assert first == "the run cannot start:"
    assert [line.partition(": ")[0] for line in lines] == [
        "actor model",
        "data.train absent.jsonl",
        f"data.train {tmp_path / 'mine.py'}:rows",
    ]


@pytest.mark.usefixtures("no_processes")
def test_a_function_of_rows_does_not_print_into_the_config(
    run_of: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "def rows():\n    print('loading')\n    return [{'prompt': '1+1=', 'answer': 2}]\n"
    (tmp_path / "mine.py").write_text(code)
    preflight.require(run_of(data={"train": [{"path": f"{tmp_path / 'mine.py'}:rows"}]}), resume=False)
    assert capsys.readouterr() == ("", "loading\n")


@pytest.mark.usefixtures("no_processes")
def test_a_run_without_training_needs_no_critic(run_of: Callable[..., RunConfig]) -> None:
    config = run_of(run={"mode": "rollout_only"}, reward_model={"path": "no/where"})
    assert problems(config) == {}
