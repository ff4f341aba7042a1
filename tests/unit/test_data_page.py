"""docs/data.md: its rows are read, its function is called, its settings are settings."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.data.dataset_rows import Dataset, read_rows, read_supervised_rows
from atoll.wire.types import Message, ToolCall
from tests.builders import run_config

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
READERS = {
    "Rows for reinforcement learning": read_rows,
    "Rows for agents": lambda dataset: read_rows(replace(dataset, agent="walker")),
    "Rows with answers to learn": read_supervised_rows,
}


def blocks(language: str) -> list[tuple[str, str]]:
    """Each block of code with the heading that it is below."""
    found = []
    for section in PAGE.read_text().split("\n## "):
        heading = section.partition("\n")[0]
        found += [(heading, block) for block in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)]
    return found


@pytest.mark.parametrize(("heading", "block"), blocks("json"))
def test_every_row_is_read(tmp_path: Path, heading: str, block: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(json.loads(block)))
    assert READERS[heading](Dataset(path))


def test_every_reader_has_rows() -> None:
    assert {heading for heading, _ in blocks("json")} == READERS.keys()


def test_what_the_rows_become(tmp_path: Path) -> None:
    def read(heading: str) -> list[Any]:
        path = tmp_path / "rows.json"
        path.write_text(f"[{','.join(block for place, block in blocks('json') if place == heading)}]")
        return READERS[heading](Dataset(path))

    prompts = read("Rows for reinforcement learning")
    assert [row.ground_truth for row in prompts] == [
        *("46", "46", "46", '["Wilhelm Röntgen", "Röntgen"]', "", "46")
    ]
    assert [len(row.messages) for row in prompts] == [1, 2, 1, 1, 1, 3]
    assert prompts[2].extra == {"split": "train", "index": "7"}
    assert prompts[5].messages[1:] == [
        Message("assistant", "", (ToolCall("call_0", "add", '{"a": 12, "b": 34}'),)),
        Message("tool", "46", tool_call_id="call_0"),
    ]
    walk, verl = read("Rows for agents")
    assert walk.extra == {"tools": '["look", "walk"]', "environment": '{"seed": 3, "size": 8}'}
    assert verl.extra.keys() == {"need_tools_kwargs", "tools_kwargs", "interaction_kwargs", "agent_name"}
    answers = read("Rows with answers to learn")
    assert [row.learned for row in answers] == [
        [False, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True],
        [False, False, False, True],
    ]
    assert [message.content for message in answers[2].messages[1:]] == ["", "46", "It is 46."]
    assert answers[2].tools[0]["function"]["name"] == "add"


def test_the_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, code)] = blocks("python")
    Path("my_data.py").write_text(code)
    Path("questions-train.jsonl").write_text('{"question": "1+1=", "solution": "it is #### 2"}\n')
    sections = [tomllib.loads(block) for _, block in blocks("toml")]
    configs = [run_config(section) for section in sections]
    assert configs[1].data.train[0].learn == ("assistant", "tool")
    [source] = configs[-1].data.train
    [row] = read_rows(Dataset(source.path, source.parameters))
    assert (row.messages[0].content, row.ground_truth) == ("1+1=", "2")
