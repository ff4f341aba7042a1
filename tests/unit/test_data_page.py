"""docs/data.md: its rows are read, its function is called, its settings are settings."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.data.dataset_rows import Dataset, read_rows, read_supervised_rows
from tests.builders import run_config

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
READERS = {
    "Rows for reinforcement learning": read_rows,
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
    assert [row.ground_truth for row in prompts] == ["46", "46", "46", '["Wilhelm Röntgen", "Röntgen"]', ""]
    assert [len(row.messages) for row in prompts] == [1, 2, 1, 1, 1]
    assert prompts[2].extra == {"split": "train", "index": "7"}
    answers = read("Rows with answers to learn")
    assert [(len(row.messages), row.response) for row in answers] == [
        (1, "12 + 34 = 46"),
        (1, "46"),
        (3, "47"),
        (1, "46"),
    ]


def test_the_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, code)] = blocks("python")
    Path("my_data.py").write_text(code)
    Path("questions-train.jsonl").write_text('{"question": "1+1=", "solution": "it is #### 2"}\n')
    sections = [tomllib.loads(block) for _, block in blocks("toml")]
    configs = [run_config(section) for section in sections]
    [source] = configs[-1].data.train
    [row] = read_rows(Dataset(source.path, source.parameters))
    assert (row.messages[0]["content"], row.ground_truth) == ("1+1=", "2")
