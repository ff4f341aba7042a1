"""docs/algorithms.md has every algorithm that the code has, with its parameters and their defaults."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from services.config.functions import ADVANTAGE, FILTER, GRADER, LOSS, REWEIGHT, Kind, built_in, check
from services.config.schema import CorrectionConfig, KLConfig, RunConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def in_tables(key: str) -> list[dict[str, object]]:
    """What the first cells of the page's tables set `key` to."""
    cells = re.findall(rf"^\| `({key} = .*?)` \|", PAGE, re.MULTILINE)
    values = [tomllib.loads(cell)[key] for cell in cells]
    flat = [value[0] if isinstance(value, list) else value for value in values]
    return [{"name": value} if isinstance(value, str) else value for value in flat]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (ADVANTAGE, "advantage"),
        (LOSS, "loss"),
        (FILTER, "filter"),
        (REWEIGHT, "reweight"),
        (GRADER, "graders"),
    ],
)
def test_every_function_has_a_row_with_its_parameters(kind: Kind, key: str) -> None:
    rows = in_tables(key)
    assert [row["name"] for row in rows] == list(built_in(kind))
    for row in rows:
        name = str(row.pop("name"))
        check(kind, name, row)
        arguments = built_in(kind)[name].args
        defaults = dict(zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
        assert row.keys() == defaults.keys()
        assert {n: d for n, d in row.items() if defaults[n]} == {
            n: ast.literal_eval(d) for n, d in defaults.items() if d
        }


def values(section: type, field: str) -> tuple[str, ...]:
    return section.model_fields[field].annotation.__args__


def test_every_choice_has_a_row() -> None:
    choices = [
        *values(RunConfig.model_fields["algorithm"].annotation, "aggregation"),
        *values(KLConfig, "estimator"),
    ]
    first_cells = " ".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert [choice for choice in choices if f"`{choice}`" not in first_cells] == []


def test_the_corrections_are_valid_and_show_all_there_is() -> None:
    corrections = [
        CorrectionConfig.model_validate(tomllib.loads(cell)["correction"])
        for cell in re.findall(r"^\| `(correction = .*?)` \|", PAGE, re.MULTILINE)
    ]
    assert {c.level for c in corrections} == set(values(CorrectionConfig, "level"))
    assert {c.method for c in corrections} == set(values(CorrectionConfig, "method"))


def test_every_guard_has_a_row() -> None:
    guards = RunConfig.model_fields["guards"].annotation
    assert [name for name in guards.model_fields if f"`{name}" not in PAGE] == []


def test_every_recipe_has_a_row() -> None:
    recipes = {path.name for path in (ROOT / "examples").glob("*.toml")} - {"arithmetic.toml", "gsm8k.toml"}
    assert set(re.findall(r"^\| `(\w+\.toml)` \|", PAGE, re.MULTILINE)) == recipes
