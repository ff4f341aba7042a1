"""Agents with OpenAI's and Anthropic's clients: what they make of every turn is what the engine drew."""

import sys
from pathlib import Path

import pytest

from tests.builders import run_config
from tests.gateway.agent_runs import engine_log
from tests.gateway.exactness import check_run, judge, one_step, write_rows

PROGRAM = """
import openai, os, sys
question = [{"role": "user", "content": sys.stdin.read()}]
answer = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=question)
assert answer.choices[0].message.content == "It is 3."
"""


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_each_token_of_the_engine_is_trained_once(tmp_path: Path, family: str) -> None:
    outcome = check_run(tmp_path, family, ["chat", "messages"], "api_agents.py:api_agent")
    assert all(set(branches) == {0} for branches in outcome.branches.values()), outcome.branches
    assert all(set(turns) == {3, 6} for turns in outcome.turns.values()), outcome.turns


def test_each_token_of_a_command_is_trained_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [("command", '1+2=\nSCRIPT: ["It is 3."]')])
    tree = one_step(tmp_path, "qwen2.5", ":", 1)
    command = {"command": [sys.executable, "-c", PROGRAM]}
    tree["agents"] = [{"name": "tested", "command": command}]
    outcome = judge(run_config(tree), ["command"], lambda: engine_log(tmp_path))
    assert (outcome.turns, outcome.branches) == ({"command": [1, 1]}, {"command": [0, 0]})
