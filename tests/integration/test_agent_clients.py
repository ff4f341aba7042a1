"""Agents with OpenAI's and Anthropic's clients: what they make of every turn is what the engine drew."""

from pathlib import Path

import pytest

from tests.gateway.exactness import check_run


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_each_token_of_the_engine_is_trained_once(tmp_path: Path, family: str) -> None:
    outcome = check_run(tmp_path, family, ["chat", "messages"], "api_agents.py:api_agent")
    assert all(set(branches) == {0} for branches in outcome.branches.values()), outcome.branches
    assert all(set(turns) == {3, 6} for turns in outcome.turns.values()), outcome.turns
