"""Every client and harness on every template, by `make test-gateway`."""

from pathlib import Path

import pytest

from tests.gateway.agent_runs import ROOT
from tests.gateway.api_agents import CLIENTS
from tests.gateway.exactness import Outcome, check_run
from tests.gateway.harness_agents import HARNESSES

PYTHON = ROOT / ".venv-gateway" / "bin" / "python"
TEMPLATES = [
    ("qwen2.5", "keep"),
    ("qwen3", "keep"),
    ("qwen3", "template"),
    ("llama3.1", "keep"),
    ("plain", "keep"),
]
each_template = pytest.mark.parametrize(("family", "thinking"), TEMPLATES)


@each_template
def test_clients(tmp_path: Path, family: str, thinking: str) -> None:
    outcome = check_run(tmp_path, family, [*CLIENTS], "api_agents.py:api_agent", thinking=thinking)
    check_branches(outcome, family, thinking)


@each_template
def test_harnesses(tmp_path: Path, family: str, thinking: str) -> None:
    agent = "harness_agents.py:harness_agent"
    outcome = check_run(tmp_path, family, HARNESSES, agent, python=PYTHON, thinking=thinking)
    check_branches(outcome, family, thinking)


def check_branches(outcome: Outcome, family: str, thinking: str) -> None:
    """smolagents rewrites its calls as prose. A template that drops thinking opens a branch at each new user
    question."""
    print(family, thinking, outcome)
    for client, branches in outcome.branches.items():
        if client == "smolagents":  # plain text that is no call stays as it was
            expected = {1} if family == "plain" else {turns - 1 for turns in outcome.turns[client]}
        elif client == "mini_swe_agent" and family == "plain":
            expected = {2}  # it leaves out replies without a call
        elif thinking == "template" and client != "mini_swe_agent":
            expected = {1}
        else:
            expected = {0}
        assert set(branches) == expected, (client, branches)
