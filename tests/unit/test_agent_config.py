"""Agents and the gateway in a config: what they need of other settings, and which words refuse what."""

from pathlib import Path

import pytest

from atoll.config.errors import ConfigError
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.wire.types import SessionEnd
from tests.builders import run_config

TOY = """
[run]
name = "toy"
steps = 2

[model]
path = "model"

[[data.train]]
path = "train.parquet"
agent = "search"

[[agents]]
name = "search"
function = "{}/mine.py:agent"
"""

MINE = """
from functools import partial

async def agent(session): ...
async def tuned(session, *, depth: int = 3): ...
async def needs(session, *, depth: int): ...
async def two(session, other): ...
def plain(session): ...
bound = partial(tuned, depth=4)
"""

OTHER = '{{ name = "{}", function = "{}/mine.py:agent" }}'
EVAL = '{ name = "v", path = "v.parquet", agent = "%s" }'


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    path = tmp_path / "toy.toml"
    path.write_text(TOY.format(tmp_path))
    return path


def agents(toy: Path, *settings: str) -> str:
    """An override: the agent `search`, with other settings."""
    function = f'function = "{toy.parent}/mine.py:agent"'
    return "agents=[{" + ", ".join(('name = "search"', function, *settings)) + "}]"


def test_an_agent_has_the_defaults_that_the_page_says(toy: Path) -> None:
    config = load(toy)
    assert config.has_agents
    (agent,) = config.agents
    assert (agent.processes, agent.concurrency, agent.max_seconds, agent.max_versions) == (1, 64, 3600.0, 0)
    assert agent.on_end.model_dump() == {
        **dict.fromkeys(("turns", "tokens", "seconds", "versions", "context", "age"), "train"),
        **dict.fromkeys(("agent_failed", "environment_failed", "cancelled"), "replace"),
    }
    ends = [end for end in SessionEnd if end is not SessionEnd.DONE]
    assert [agent.on_end.of(end.value) for end in ends] == ["train"] * 6 + ["replace"] * 3
    assert not run_config().has_agents


def test_agents_may_be_for_validation_alone(toy: Path) -> None:
    sets = f"validation.sets=[{EVAL % 'search'}]"
    config = load(toy, ["data.train=[{path='t.parquet'}]", sets])
    assert config.has_agents


@pytest.mark.parametrize("function", ["agent", "tuned", "bound"])
def test_functions_that_fit(toy: Path, function: str) -> None:
    toy.write_text(TOY.replace(":agent", f":{function}").format(toy.parent))
    load(toy)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine.py:absent", "no function 'absent'; it defines agent, tuned, needs, two, plain"),
        (
            "mine.py:plain",
            "got `def plain`, expected `async def plain(session: AgentSession) -> float |",
        ),
        ("mine.py:two", "got `async def two(session, other)`, expected `async def two("),
        ("mine.py:needs", "needs depth"),
        ("absent.py:agent", "No such file"),
        ("search", "expected file.py:function of your own"),
    ],
)
def test_functions_that_do_not_fit(toy: Path, function: str, message: str) -> None:
    toy.write_text(TOY.replace("mine.py:agent", function).format(toy.parent))
    with pytest.raises(ConfigError) as raised:
        load(toy)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train=[{path='t', agent='serch'}]"],
            '[[data.train]]: agent = "serch": there is no such agent; did you mean search? Known: search',
        ),
        ([f"validation.sets=[{EVAL % 'x'}]"], '[[validation.sets]]: agent = "x": there is no such agent; Kn'),
        (["agents=[]"], 'no such agent; Add an [[agents]] table with name = "search"'),
        (["data.train=[{path='t'}]"], '[[agents]]: no dataset has agent = "search": set it in a'),
        (
            ["data.train=[{path='t'}]", "agents=[]", "gateway.instances=2"],
            '[gateway] serves agents: set agent = "NAME" in a [[data.train]] table',
        ),
        (["gateway.port=65535", "gateway.instances=2"], "would listen above port 65535: lower port"),
        (["gateway.rules=['fold']"], "gateway.rules.0: Input should be 'billing_header' or 'fold_system'"),
        (
            ["algorithm.advantage=remax", "coordinator.greedy_baseline=true"],
            "with one greedy response, which a multi-turn session does not have: remove it and use another",
        ),
        (
            ["warmup={steps=1, source={path='w', agent='search'}}"],
            "[warmup.source] learns from the answers of its rows, without an agent: remove agent",
        ),
        (
            ["run.mode=supervised"],
            'run.mode = "supervised" learns from the answers of its rows, without an agent: remove agent',
        ),
        (["run.mode=train_only", "data.train=[]", "data.replay=d"], "remove agents"),
        (
            ["data.train=[{path='t'}]", "agents=[]", "reward.graders=[{name='code', file='s.py'}]"],
            'reward.graders: code: file = "s.py" is in an agent\'s workspace, and no dataset has an agent: ',
        ),
    ],
)
def test_settings_that_contradict_each_other(toy: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(toy, overrides)
    assert message in str(raised.value)


def test_two_agents_of_one_name_are_refused(toy: Path) -> None:
    others = ", ".join(OTHER.format("search", toy.parent) for _ in range(2))
    with pytest.raises(ConfigError, match='"search" is the name of two agents: rename one'):
        load(toy, [f"agents=[{others}]"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=gdpo"], 'has reward = "session", and algorithm.advantage = "gdpo" combines'),
        (
            ["algorithm.constraint={cost='exact_match'}"],
            "and algorithm.constraint.cost = 'exact_match' comes from reward.graders: set reward",
        ),
        (
            ["algorithm.filter={name='scores_differ', component='maths'}"],
            "and algorithm.filter compares component = 'maths' of reward.graders: remove component, which",
        ),
        (
            ["reward.graders=['maths']"],
            "reward.graders score nothing, since the agents of all datasets have",
        ),
    ],
)
def test_graders_cannot_score_sessions_that_bring_their_reward(
    toy: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(toy, [agents(toy, 'reward = "session"'), *overrides])
    assert message in str(raised.value)


def test_whole_rewards_of_sessions_may_be_filtered(toy: Path) -> None:
    config = load(toy, [agents(toy, 'reward = "session"'), "algorithm.filter=scores_differ"])
    assert config.algorithm.filter is not None
    assert config.algorithm.filter.name == "scores_differ"


def test_a_reward_service_is_for_datasets_that_graders_score(toy: Path) -> None:
    own = agents(toy, 'reward = "session"')
    plain = "data.train=[{path='t'}, {path='u', agent='search'}]"
    cases: dict[str, RunConfig] = {
        "graders": load(toy),
        "session": load(toy, [own]),
        "session, without graders": load(toy, [own, "reward.graders=[]"]),
        "session and graders": load(toy, [own, plain]),
        "session, with a sandbox": load(toy, [own, "reward.sandbox={}"]),
    }
    assert {case: config.has_reward_service for case, config in cases.items()} == {
        "graders": True,
        "session": False,
        "session, without graders": False,
        "session and graders": True,
        "session, with a sandbox": True,
    }
