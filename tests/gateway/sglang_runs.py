"""OpenAI's and Anthropic's clients on real SGLang, by `make test-gateway`.

What the policy says is learned by heart, not scripted: it may say something else, with the probability that
its log-probabilities state, and then that is trained on. SGLang's own log of requests says what it drew.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.cli.launch.launcher import launch
from atoll.gateway.templates.tool_calls import hermes_calls
from atoll.runtime.rendering import Renderer
from tests.builders import run_config
from tests.command import atoll
from tests.gateway.agent_runs import ROOT, write_model
from tests.gateway.agents import ADD, add
from tests.gateway.api_agents import CLIENTS, SYSTEM
from tests.gateway.exactness import MORE, QUESTION, judge, one_step, until_ended, write_rows
from tests.gateway.scripts import scripts

FAMILY = "qwen2.5"
LOG = {"log_requests": True, "log_requests_level": 3, "log_requests_format": "json"}
QUESTIONS = (QUESTION, *MORE)
MAX_TURNS = 8


def test_clients_on_sglang(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [(client, QUESTION) for client in CLIENTS])
    log = tmp_path / "requests"
    rollout = {
        "engine": "sglang",
        "python": ROOT / ".venv-sglang" / "bin" / "python",
        "local": {},
        "sglang": {"device": "cpu", "log_level": "error", "log_requests_target": str(log), **LOG},
    }
    tree = one_step(tmp_path, FAMILY, "api_agents.py:api_agent", len(CLIENTS), rollout=rollout)
    tree["agents"][0]["max_turns"] = MAX_TURNS
    tree["model"] = {"path": fitted(tmp_path)}
    outcome = judge(run_config(tree), [*CLIENTS], lambda: list(request_log(log)))
    print(outcome)
    assert all(set(branches) == {0} for branches in outcome.branches.values()), outcome.branches
    for turns in outcome.turns.values():  # one for each question, and one for each reply with calls
        assert len(QUESTIONS) <= min(turns) <= max(turns) <= MAX_TURNS
        assert max(turns) > len(QUESTIONS), outcome.turns


def fitted(folder: Path) -> Path:
    """A model over-fitted to the replies of one conversation."""
    model = write_model(folder / "random", FAMILY, hidden_size=64, intermediate_size=128)
    rows = list(lessons(Renderer(model)))
    (folder / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_config(
        run={"name": "sft", "dir": folder / "runs", "mode": "supervised", "steps": 150},
        model={"path": model},
        data={"train": [{"path": folder / "lessons.jsonl"}]},
        coordinator={"prompts_per_step": len(rows)},
        trainer={
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.0}
        },
    )
    assert launch(run, until_ended, resume=False)
    atoll(folder, "export", run.folder, "--out", folder / "fitted")
    return folder / "fitted"


def lessons(renderer: Renderer) -> Iterator[Mapping[str, Any]]:
    """A row per turn: its prompt and its reply. The last question has two replies, because log-probabilities
    that are all near 0 would hide most mistakes."""
    # rows have no tools: they are in the system message, as the template writes them
    head = renderer.render([{"role": "system", "content": SYSTEM}], [ADD], add_generation_prompt=False)
    system = head.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    messages = [{"role": "system", "content": system}]
    script = iter(scripts(FAMILY, "chat")[0])
    for question in QUESTIONS:
        said = [{"role": "user", "content": question}]
        while said:
            messages += said
            reply = next(script)
            yield {"prompt": list(messages), "response": reply}
            messages.append({"role": "assistant", "content": reply})
            said = [{"role": "tool", "content": add(text)} for _, text in hermes_calls(reply).calls]
    yield {"prompt": messages[:-1], "response": next(script)}


def request_log(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Turns that SGLang finished. Requests of other kinds have ids of another form."""
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line[line.index("{") :])
            attempt, _, id = entry["rid"].partition(":")
            if entry["event"] == "request.finished" and attempt.isdecimal():
                out = entry["out"]
                yield {"id": id, "ids": out["output_ids"], "end": out["meta_info"]["finish_reason"]["type"]}
