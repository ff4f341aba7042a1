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


@pytest.mark.parametrize(
    ("kind", "name", "parameters", "expected"),
    [
        (ADVANTAGE, "gae", {"gamma": -1}, "gamma = -1, expected at least 0 and at most 1"),
        (ADVANTAGE, "gae", {"gamma": 5.0}, "gamma = 5.0, expected at least 0 and at most 1"),
        (ADVANTAGE, "gae", {"lam": 1.01}, "lam = 1.01, expected at least 0 and at most 1"),
        (ADVANTAGE, "vapo", {"length_alpha": 0}, "length_alpha = 0, expected more than 0"),
        (ADVANTAGE, "vapo", {"value_lam": -0.1}, "value_lam = -0.1, expected at least 0 and at most 1"),
        (ADVANTAGE, "reinforce_pp", {"gamma": 2}, "gamma = 2, expected at least 0 and at most 1"),
        (LOSS, "ppo_clip", {"clip_low": -0.2}, "clip_low = -0.2, expected at least 0 and at most 1"),
        (LOSS, "ppo_clip", {"clip_low": 2}, "clip_low = 2, expected at least 0 and at most 1"),
        (LOSS, "ppo_clip", {"clip_high": -0.2}, "clip_high = -0.2, expected at least 0"),
        (LOSS, "ppo_clip", {"dual_clip": 0.5}, "dual_clip = 0.5, expected more than 1"),
        (LOSS, "ppo_clip", {"dual_clip": -3.0}, "dual_clip = -3.0, expected more than 1"),
        (LOSS, "gspo", {"clip_high": -1e-4}, "clip_high = -0.0001, expected at least 0"),
        (LOSS, "gmpo", {"clip_low": -0.4}, "clip_low = -0.4, expected at least 0"),
        (LOSS, "sapo", {"tau_positive": 0}, "tau_positive = 0, expected more than 0"),
        (LOSS, "sapo", {"tau_negative": -1.0}, "tau_negative = -1.0, expected more than 0"),
        (LOSS, "cispo", {"clip_low": 10}, "clip_low = 10, expected at least 0 and at most 1"),
        (LOSS, "dppo_tv", {"max_ratio": -1}, "max_ratio = -1, expected at least 1"),
        (LOSS, "dppo_tv", {"clip_high": 1.5}, "clip_high = 1.5, expected at least 0 and at most 1"),
        (LOSS, "clip_cov", {"share": 3}, "share = 3, expected more than 0 and at most 1"),
        (LOSS, "clip_cov", {"min_cov": 6}, "max_cov = 5.0, expected more than min_cov = 6"),
        (LOSS, "clip_cov", {"max_cov": 0.5}, "max_cov = 0.5, expected more than min_cov = 1.0"),
        (LOSS, "kl_cov", {"coef": -1}, "coef = -1, expected at least 0"),
        (REWEIGHT, "pow", {"power": -1}, "power = -1, expected at least 0"),
        (GRADER, "overlong", {"max_tokens": 8, "buffer": 0}, "buffer = 0, expected more than 0"),
        (GRADER, "overlong", {"max_tokens": 8, "buffer": 9}, "max_tokens = 8, expected at least buffer = 9"),
        (GRADER, "repetition", {"ngram": 0}, "ngram = 0, expected more than 0"),
        (GRADER, "maths", {"right": -1, "wrong": 0}, "right = -1, expected more than wrong = 0"),
        (GRADER, "maths", {"wrong": 1.0}, "right = 1.0, expected more than wrong = 1.0"),
        (GRADER, "length_target", {"tokens": 0}, "tokens = 0, expected more than 0"),
        (GRADER, "length_cost", {"per_token": -1}, "per_token = -1, expected at least 0"),
        (GRADER, "edit_similarity", {"minimum": 80}, "minimum = 80, expected at least 0 and at most 1"),
        (GRADER, "search_r1", {"format_score": 1.5}, "format_score = 1.5, expected at least 0 and at most 1"),
        (GRADER, "multiple_choice", {"choices": 27}, "choices = 27, expected at least 2 and at most 26"),
        (GRADER, "code", {"memory_mb": 0}, "memory_mb = 0, expected more than 0"),
    ],
)
def test_a_value_out_of_its_range(
    kind: FunctionKind, name: str, parameters: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(kind, name, parameters)
    assert str(refusal.value) == f"{kind.setting}: {name}: {expected}"


@pytest.mark.parametrize(
    ("kind", "name", "parameters"),
    [
        (ADVANTAGE, "gae", {"gamma": 0, "lam": 1}),
        (LOSS, "ppo_clip", {"clip_low": 1, "clip_high": 0, "dual_clip": 1.001}),
        (LOSS, "clip_cov", {"min_cov": 6, "max_cov": 7}),
        (GRADER, "overlong", {"max_tokens": 8, "buffer": 8}),
        (GRADER, "maths", {"right": 1, "wrong": -1}),
    ],
)
def test_a_range_includes_its_bounds(kind: FunctionKind, name: str, parameters: dict[str, object]) -> None:
    check(kind, name, parameters)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_every_number_of_a_built_in_function_has_a_range(kind: FunctionKind) -> None:
    """`min_cov` and `wrong` are any number below `max_cov` and `right`."""
    unbounded = {
        f"{name}.{argument.arg}"
        for name, definition in built_in(kind).items()
        for argument in definition.args.kwonlyargs
        if ast.unparse(argument.annotation).startswith(("float", "int"))
    }
    assert unbounded <= {"clip_cov.min_cov", "maths.wrong"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"length_alpha = (nan|inf) \(float\), expected float"):
        check(ADVANTAGE, "vapo", {"length_alpha": value})


def test_a_users_function_has_ranges_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "from typing import Annotated\nfrom annotated_types import Ge, Le, Lt\nLIMIT = 3\n"
        "def f(item, *, low: Annotated[float, Ge(-1.5), Lt('high')] = 0.0, high: float = LIMIT,\n"
        "      any: Annotated[int, Le(LIMIT)] | None = None): return low\n"
    )
    name = f"{tmp_path}/f.py:f"
    check(GRADER, name, {"low": 9, "any": 9})  # bounds that are no literals
    with pytest.raises(ConfigError, match=r"low = -2, expected at least -1\.5$"):
        check(GRADER, name, {"low": -2})
    with pytest.raises(ConfigError, match=r"low = 2, expected at least -1\.5 and less than high = 1$"):
        check(GRADER, name, {"low": 2, "high": 1})


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
