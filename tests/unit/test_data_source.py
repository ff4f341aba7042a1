"""Every data_source that verl grades is routed to one of our graders with valid parameters."""

import re

import pytest

from atoll.config.schema import GraderConfig
from atoll.reward.sources import ROUTES, Route, data_source
from atoll.reward.verifiers.gsm8k import gsm8k
from atoll.reward.verifiers.text_match import search_r1
from tests.unit.verifier_items import graded, item

BOXED = Route("maths", {"answer": "boxed"})
DAPO = Route("maths", {"answer": "line_or_boxed", "wrong": -1.0})
ANY = Route("maths", {"answer": "any"})
CODE = Route("code", {"pass_fraction": True})
# the names known to verl's default_compute_score as of January 2026
VERL = {
    "openai/gsm8k": Route("gsm8k"),
    "lighteval/MATH": BOXED,
    "DigitalLearningGmbH/MATH-lighteval": BOXED,
    "HuggingFaceH4/MATH-500": BOXED,
    "math_dapo": DAPO,
    "math": DAPO,
    "math_dapo_reasoning": DAPO,
    "aime2024": DAPO,
    "aime_2025": DAPO,
    "numina_aops_forum": ANY,
    "numina_synthetic_math": ANY,
    "numina_amc_aime": ANY,
    "numina_synthetic_amc": ANY,
    "numina_cn_k12": ANY,
    "numina_olympiads": ANY,
    "codecontests": CODE,
    "apps": CODE,
    "codeforces": CODE,
    "taco": CODE,
    "hiyouga/geometry3k": BOXED,
    "searchR1_nq": Route("search_r1"),
    "searchR1_triviaqa": Route("search_r1"),
    "searchR1_popqa": Route("search_r1"),
    "searchR1_hotpotqa": Route("search_r1"),
    "searchR1_2wikimultihopqa": Route("search_r1"),
    "searchR1_musique": Route("search_r1"),
    "searchR1_bamboogle": Route("search_r1"),
}


@pytest.mark.parametrize("source", VERL)
def test_verls_names(source: str) -> None:
    assert data_source(item("", data_source=source)) == VERL[source]


def test_every_route_is_to_a_grader_with_parameters_that_it_takes() -> None:
    """The config rejects others."""
    for route in ROUTES.values():
        GraderConfig.model_validate({"name": route.grader, **route.parameters})


@pytest.mark.parametrize("source", ["gsm8k", "openai/gsm8k2", "MATH", "my_apps", ""])
def test_another_source_is_an_error_that_names_the_known_ones(source: str) -> None:
    message = re.escape(f"data_source {source!r} has no grader; known: openai/gsm8k, lighteval/MATH, ")
    with pytest.raises(ValueError, match=message):
        data_source(item("", data_source=source))
    assert data_source(item("", data_source=source), default="exact_match") == Route("exact_match")


def test_graders_of_two_sources_say_what_verl_says() -> None:
    # of openai/gsm8k: strict, within the last 300 characters, compared as text
    assert gsm8k(item("He has 5 + 4 = 9.\n#### 9", "9")) == 1.0
    assert gsm8k(item("He has 9", "9")) == 0.0
    # of searchR1_nq: EM of the last tag against any of the targets
    truth = '{"target": ["Wilhelm Conrad Röntgen"]}'
    assert graded(search_r1(item("<answer>wilhelm conrad röntgen</answer>", truth)))[0] == 1.0
    assert graded(search_r1(item("<answer>Röntgen</answer>", truth)))[0] == 0.0
