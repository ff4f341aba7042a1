"""docs/agents.md: its functions and its tables are valid, and it has every name that a user may meet."""

import re
from pathlib import Path

import pytest

from atoll import AgentSession
from atoll.config import functions
from atoll.config.load import load
from atoll.config.schema import SessionEndsConfig
from atoll.gateway.history.tree import Cause
from atoll.wire.types import AgentTask, GroupId, SampleId, SessionId

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def first_cells(heading: str) -> set[str]:
    """Of the tables below a heading, what is set as code."""
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    return set(re.findall(r"`(.*?)`", cells))


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's first function, as the file that it names, beside the examples."""
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_its_functions_are_agents(number: int, tmp_path: Path) -> None:
    (name,) = re.findall(r"async def (\w+)", blocks("python")[number])
    (tmp_path / "mine.py").write_text(blocks("python")[number])
    functions.check(functions.AGENT, f"{tmp_path}/mine.py:{name}", {})
    assert functions.load_user_function(f"{tmp_path}/mine.py:{name}", is_async=True)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("block", blocks("toml"))
def test_its_tables_are_valid(block: str) -> None:
    Path("run.toml").write_text('[run]\nname = "page"\nsteps = 1\n[model]\npath = "model"\n' + block)
    config = load(Path("run.toml"))
    assert config.agents[0].name == config.data.train[0].agent


def test_it_has_every_end_cause_and_name() -> None:
    assert first_cells("## How sessions end") == {"on_end", *SessionEndsConfig.model_fields}
    assert first_cells("### Branches") == {cause.value for cause in Cause} - {""}
    row = AgentTask(SessionId(SampleId(GroupId("run", 0, 0), 0), 0), "a", "m", "u", "k", "r", (), "", "", {})
    session = AgentSession(row)
    named = first_cells("### Your own function")
    offered = {name for name in {*vars(session), *dir(session)} if not name.startswith("_")} - {"aclose"}
    assert {name.removeprefix("await ").partition("(")[0] for name in named} == {"AgentSession", *offered}
