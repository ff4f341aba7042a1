"""Functions named in a config: judged by their source, loaded when a service starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config import functions
from atoll.config.errors import ConfigError
from atoll.config.functions import (
    ADVANTAGE,
    FILTER,
    GRADER,
    LOSS,
    REWEIGHT,
    FunctionKind,
    built_in,
    check,
    load,
)
from atoll.config.schema import AdvantageConfig, GraderConfig

KINDS = [ADVANTAGE, LOSS, FILTER, REWEIGHT, GRADER]

MINE = """
import math
from functools import partial

LIMIT = 3

def plain(item): return 1.0

def tuned(item, *, power: float = 2.0, mode: str = "fast", times: int = 1, on: bool = False,
          ceiling: float | None = None, needed: int): return power

def anything(item, **parameters): return 1.0

def two(item, other): return 1.0

def none(): return 1.0

async def later(item): return 1.0

bound = partial(tuned, needed=1)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_the_source_says_what_the_imported_dict_holds(kind: FunctionKind) -> None:
    script = (
        f"from {kind.file.removesuffix('.py').replace('/', '.')} import {kind.table} as table\n"
        "import inspect\n"
        "print({name: [(p.name, p.default) for p in inspect.signature(f).parameters.values()\n"
        "       if p.kind is p.KEYWORD_ONLY and p.default is not p.empty] for name, f in table.items()})"
    )
    imported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    read = {
        name: [
            (argument.arg, ast.literal_eval(default))
            for argument, default in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
            if default is not None
        ]
        for name, definition in built_in(kind).items()
    }
    assert read == ast.literal_eval(imported.stdout)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_traits_are_of_functions_that_there_are(kind: FunctionKind) -> None:
    table = functions.traits(kind)
    assert table.keys() <= built_in(kind).keys()
    assert {trait for traits in table.values() for trait in traits} == set(kind.traits)


def test_a_config_knows_the_traits_of_its_function(mine: Path) -> None:
    assert AdvantageConfig(name="gae").has("needs_values")
    assert not AdvantageConfig(name="gae").has("group_relative")
    assert not AdvantageConfig(name="reinforce_pp").has("needs_values")  # it has none at all
    assert not AdvantageConfig(name=f"{mine}:anything").has("group_relative")


def test_reading_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "from atoll.config.functions import LOSS, check\n"
        "check(LOSS, 'ppo_clip', {'clip_high': 0.28})\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


@pytest.mark.parametrize(
    ("kind", "name", "parameters"),
    [
        (ADVANTAGE, "gae", {"gamma": 1, "lam": 0.95}),  # an int serves as a float
        (ADVANTAGE, "grpo", {}),
        (LOSS, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}),
        (GRADER, "overlong", {"max_tokens": 8, "buffer": 2}),
    ],
)
def test_what_fits_passes(kind: FunctionKind, name: str, parameters: dict[str, object]) -> None:
    check(kind, name, parameters)


@pytest.mark.parametrize(
    ("kind", "name", "parameters", "message"),
    [
        (ADVANTAGE, "gea", {}, r"algorithm\.advantage = 'gea': no such function; did you mean gae"),
        (LOSS, "xyz", {}, r"no such function; Known: ppo_clip, .*, or file\.py:function of your own"),
        (LOSS, "mine.py", {}, r"or file\.py:function of your own"),
        (
            ADVANTAGE,
            "gae",
            {"lambda": 0.9},
            r"algorithm\.advantage: gae has no parameter 'lambda'; did you mean lam\? "
            r"Its parameters: gamma: float = 1\.0, lam: float = 1\.0",
        ),
        (ADVANTAGE, "grpo", {"lam": 0.9}, r"grpo has no parameter 'lam'; Its parameters: none"),
        (LOSS, "ppo_clip", {"clip_low": "a"}, r"ppo_clip: clip_low = 'a' \(str\), expected float"),
        (LOSS, "ppo_clip", {"clip_low": True}, r"clip_low = True \(bool\), expected float"),
        (GRADER, "overlong", {"max_tokens": 8.5, "buffer": 2}, r"max_tokens = 8\.5 \(float\), expected int"),
        (GRADER, "overlong", {"max_tokens": 8}, r"overlong needs buffer; its parameters: max_tokens: int,"),
    ],
)
def test_a_built_in_function_that_does_not_fit(
    kind: FunctionKind, name: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(kind, name, parameters)


def test_a_mistyped_setting_beside_the_name_is_recognised() -> None:
    with pytest.raises(ConfigError, match=r"exact_match has no parameter 'wieght'; did you mean weight\?"):
        check(GRADER, "exact_match", {"wieght": 1.0}, {"weight"})


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        ("plain", {}),
        ("tuned", {"power": 3, "mode": "slow", "times": 2, "on": True, "ceiling": 1.5, "needed": 1}),
        ("anything", {"whatever": "x"}),
        ("bound", {"power": 3.0}),  # not a def: the service that calls it looks
    ],
)
def test_a_users_function_that_fits(mine: Path, function: str, parameters: dict[str, object]) -> None:
    check(GRADER, f"{mine}:{function}", parameters)
    grader = GraderConfig.model_validate({"name": f"{mine}:{function}"} | parameters)
    assert load(grader, {})("item") == parameters.get("power", 1.0)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("{}/absent.py:f", {}, r"absent\.py: No such file .*; paths are relative to the current folder"),
        ("{}/broken.py:f", {}, r"broken\.py is not valid Python: .*line 2"),
        ("{}/null.py:f", {}, r"null\.py is not valid Python"),
        ("{}/mine.py:absent", {}, r"no function 'absent'; it defines plain, tuned, anything, two, none"),
        (
            "{}/mine.py:two",
            {},
            r"got `def two\(item, other\)`, expected `def two\(item: ScoreItem, \*, \.\.\.\) ->",
        ),
        ("{}/mine.py:none", {}, r"got `def none\(\)`, expected"),
        ("{}/mine.py:later", {}, r"got `async def later`, expected"),
        ("{}/mine.py:tuned", {"needed": 1, "powr": 1.0}, r"no parameter 'powr'; did you mean power\?"),
        ("{}/mine.py:tuned", {"needed": 1, "times": 1.5}, r"times = 1\.5 \(float\), expected int"),
        ("{}/mine.py:tuned", {"needed": 1, "ceiling": "x"}, r"'x' \(str\), expected float \| None"),
        ("{}/mine.py:tuned", {"needed": 1, "on": 1}, r"on = 1 \(int\), expected bool"),
        ("{}/mine.py:tuned", {}, r"tuned needs needed"),
    ],
)
def test_a_users_function_that_does_not_fit(
    tmp_path: Path, mine: Path, name: str, parameters: dict[str, object], message: str
) -> None:
    (tmp_path / "broken.py").write_text("\ndef f(:\n")
    (tmp_path / "null.py").write_bytes(b"x = '\0'\n")
    with pytest.raises(ConfigError, match=message):
        check(GRADER, name.format(tmp_path), parameters)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_module\ndef f(item): return 1.0", r"f\.py cannot be imported: ModuleNotFoundError"),
        ("f = 3", r"f\.py:f does not fit: expected a plain function, got int 3"),
        ("def g(): ...\nf = g", r"f\.py:f does not fit: .*; expected one positional parameter, .* got \(\)"),
        ("async def g(item): ...\nf = g", r"expected a plain function, got an async function"),
    ],
)
def test_what_only_the_import_shows(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "f.py").write_text(source)
    config = GraderConfig(name=f"{tmp_path}/f.py:f")  # by the source it may fit
    with pytest.raises(ConfigError, match=message):
        load(config, {})


def test_parameters_are_bound() -> None:
    def scaled(item: float, *, by: float = 1.0) -> float:
        return item * by

    config = GraderConfig.model_construct(name="scaled", by=3.0)
    assert load(config, {"scaled": scaled})(2.0) == 6.0


def test_a_file_that_is_gone_when_the_service_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.py: no such file; .*gone\.py:f is read from"):
        functions.load_user_function(f"{tmp_path}/gone.py:f")
