"""docs/algorithms.md has every algorithm that the code has, docs/rewards.md every grader, with its parameters
and their defaults."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from atoll.config.functions import ADVANTAGE, FILTER, GRADER, LOSS, REWEIGHT, FunctionKind, built_in, check
from atoll.config.load import validate
from atoll.config.schema import CorrectionConfig, KLConfig, RunConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def in_tables(page: str, key: str) -> list[dict[str, object]]:
    """What the first cells of the page's tables set `key` to."""
    cells = re.findall(rf"^\| `({key} = .*?)` \|", page, re.MULTILINE)
    values = [tomllib.loads(cell)[key] for cell in cells]
    flat = [value[0] if isinstance(value, list) else value for value in values]
    return [{"name": value} if isinstance(value, str) else value for value in flat]


@pytest.mark.parametrize(
    ("kind", "page", "key"),
    [
        (ADVANTAGE, "algorithms.md", "advantage"),
        (LOSS, "algorithms.md", "loss"),
        (FILTER, "algorithms.md", "filter"),
        (REWEIGHT, "algorithms.md", "reweight"),
        (GRADER, "rewards.md", "graders"),
    ],
)
def test_every_function_has_a_row_with_its_parameters(kind: FunctionKind, page: str, key: str) -> None:
    rows = in_tables((ROOT / "docs" / page).read_text(), key)
    assert [row["name"] for row in rows] == list(built_in(kind))
    for row in rows:
        name = str(row.pop("name"))
        check(kind, name, row)
        arguments = built_in(kind)[name].args
        defaults = dict(zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
        assert row.keys() == defaults.keys()
        # a row shows an example of what has no default, or None, which TOML cannot say
        values = {name: ast.literal_eval(default) for name, default in defaults.items() if default}
        shown = {name: value for name, value in values.items() if value is not None}
        assert {name: value for name, value in row.items() if name in shown} == shown


def test_the_first_example_is_a_whole_config() -> None:
    example = PAGE.split("```toml\n")[1].split("```")[0]
    assert validate(tomllib.loads(example), "docs/algorithms.md").algorithm.advantage.name == "grpo"


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
    others = {
        "agents.toml",
        "calculator.toml",
        "coding.toml",
        "guess.toml",
        "arithmetic.toml",
        "arithmetic_sglang.toml",
        "gsm8k.toml",
    }
    others |= {"gpu_1.toml", "gpu_8.toml", "gpu_2_hosts.toml"}
    recipes = {path.name for path in (ROOT / "examples").glob("*.toml")} - others
    assert set(re.findall(r"^\| `(\w+\.toml)` \|", PAGE, re.MULTILINE)) == recipes
