"""Text graders on cases worked out by hand, and on long responses built to be slow."""

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing.exceptions import Unresolvable

from atoll.config.errors import ConfigError
from atoll.config.functions import load
from atoll.config.schema import GraderConfig
from atoll.reward.score import GRADERS, SANDBOXED
from atoll.reward.verifiers.answers import accepted_answers, extract_answer_text, extract_tagged
from atoll.reward.verifiers.exact_match import exact_match
from atoll.reward.verifiers.formats import regex, think_format
from atoll.reward.verifiers.json_schema import json_schema, last_json
from atoll.reward.verifiers.length import length_target
from atoll.reward.verifiers.repetition import repetition
from atoll.reward.verifiers.text_match import (
    edit_similarity,
    normalize,
    normalized_match,
    search_r1,
    token_f1,
)
from atoll.wire.types import Grade
from tests.unit.verifier_items import graded, item

CAPITAL = '{"target": ["Paris", "the City of Light"]}'


@pytest.mark.parametrize(
    ("response", "contents"),
    [
        ("no tag", []),
        ("<answer>a</answer>", ["a"]),
        ("<answer>a</answer><answer> b\n</answer>", ["a", " b\n"]),
        ("<answer>a<answer>b</answer>c</answer>", ["a<answer>b"]),  # as <answer>(.*?)</answer> finds them
        ("</answer><answer>a</answer><answer>open", ["a"]),
        ("<ANSWER>a</ANSWER>", []),
    ],
)
def test_tags(response: str, contents: list[str]) -> None:
    assert extract_tagged(response, "answer") == contents


@given(
    st.lists(st.sampled_from(["<answer>", "</answer>", "<think>", "a", "\n", "<", "answer>"])).map("".join)
)
def test_tags_are_those_that_the_fields_regular_expression_finds(response: str) -> None:
    assert extract_tagged(response, "answer") == re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)


@settings(deadline=None, max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, list | dict))
)
def test_the_last_json_of_prose_is_what_was_written(value: Any) -> None:
    assert last_json(f"See [1] and {{x}}: {json.dumps(value, indent=1)} That is it.") == value


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 46", "46"),
        ("first Answer: 45\nthen the **Answer:** 46\nbye", "46"),
        ("ANSWER : $46$", "46"),
        ("The answer is 46", None),
        ("answers: 46", None),
        ("Answer:\n46", ""),
    ],
)
def test_the_line_that_states_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer_text(response, "line") == answer


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("Paris", ["Paris"]),
        ('["Paris", "Lutetia"]', ["Paris", "Lutetia"]),
        ('{"target": "Paris"}', ["Paris"]),
        (CAPITAL, ["Paris", "the City of Light"]),
        ("46", ["46"]),
        ("[1, 2]", ["[1, 2]"]),  # an answer that is a list, not several answers
        ("[]", ["[]"]),
        ('{"x": "Paris"}', ['{"x": "Paris"}']),
    ],
)
def test_right_answers(truth: str, answers: list[str]) -> None:
    assert accepted_answers(item("", truth)) == answers


@pytest.mark.parametrize("target", ["[1879]", "1879", "[]", "null"])
def test_a_target_that_nobody_can_state_is_an_error_and_no_zero(target: str) -> None:
    with pytest.raises(
        ValueError, match=r"ground truth: got the target .*, expected a string or a list of strings"
    ):
        search_r1(item("<answer>1879</answer>", f'{{"target": {target}}}'))


def test_exact_match_takes_the_place_of_the_answer() -> None:
    assert graded(exact_match(item("I think <answer> 46 </answer>"), answer="tag")) == (1.0, "")
    assert graded(exact_match(item("I think <answer> 47 </answer>"), answer="tag")) == (0.0, "")
    assert graded(exact_match(item("46"), answer="tag")) == (0.0, "no answer")
    assert graded(exact_match(item("I think\nAnswer: 46"), answer="line")) == (1.0, "")
    assert graded(exact_match(item("I think\nAnswer: 46"))) == (0.0, "")


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        *(
            (name, "")
            for name in ("exact_match", "normalized_match", "token_f1", "edit_similarity", "search_r1")
        ),
        ("search_r1", '{"target": ""}'),
        ("normalized_match", '["Paris", " "]'),
        ("gsm8k", ""),
        ("gsm8k", "five"),
        ("gsm8k", "1/2"),
        ("maths", ""),
    ],
)
def test_a_truth_that_no_answer_can_equal_is_an_error_and_no_zero(name: str, truth: str) -> None:
    with pytest.raises(ValueError, match=r"row 7 \(the first is 0\) has no ground truth|ground truth: got"):
        GRADERS[name](item("<answer></answer>", truth))


def test_truths_as_their_grader_writes_answers() -> None:
    assert GRADERS["gsm8k"](item("#### 5,600", "$5,600 ")) == 1.0
    assert GRADERS["gsm8k"](item("#### 5601", "5,600")) == 0.0
    assert exact_match(item("Answer: $46$", "$46$"), answer="line") == 1.0
    with pytest.raises(ValueError, match="expected one line"):
        exact_match(item("Answer: 46", "4\n6"), answer="line")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        # worked out by SQuAD's rule: lower case, then no punctuation, then no articles, then single spaces
        ("The  Eiffel Tower!", "eiffel tower"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("it's\tthe-end", "its theend"),
        ("Zoë", "zoë"),
        ("A", "a"),  # the rule would leave nothing, so that it would equal "the" and "!"
        ("!", "!"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("paris.", CAPITAL, 1.0),
        ("City of light", CAPITAL, 1.0),
        ("Paris, France", CAPITAL, 0.0),
        ("the", "a", 0.0),
        ("", CAPITAL, 0.0),
    ],
)
def test_normalized_match(response: str, truth: str, value: float) -> None:
    assert graded(normalized_match(item(response, truth))) == (value, "")


@pytest.mark.parametrize(
    ("response", "truth", "f1"),
    [
        ("Paris", "Paris", 1.0),
        ("the cat sat", "a cat sat down", 2 * 2 / (2 + 3)),  # cat, sat of cat, sat, down: P = 1, R = 2/3
        ("Paris Paris", "Paris", 2 * 1 / (2 + 1)),  # a word counts as often as both have it
        ("the City", CAPITAL, 2 * 1 / (1 + 3)),  # of city of light: the best of the right answers
        ("London", CAPITAL, 0.0),
        ("", CAPITAL, 0.0),
    ],
)
def test_token_f1(response: str, truth: str, f1: float) -> None:
    value, reason = graded(token_f1(item(response, truth)))
    assert (value, reason) == (pytest.approx(f1), "")


def test_edit_similarity() -> None:
    # kitten -> sitting: 3 edits, the longer has 7 characters
    assert graded(edit_similarity(item("Kitten", "sitting"))) == (pytest.approx(1 - 3 / 7), "")
    assert graded(edit_similarity(item("Kitten", "sitting"), minimum=0.6)) == (0.0, "")
    assert graded(edit_similarity(item("kitten", '["sitting", "kitten!"]'))) == (1.0, "")
    assert graded(edit_similarity(item("x" * 10_001, "x"))) == (0.0, "too long")
    assert graded(edit_similarity(item("x", "x"), answer="tag")) == (0.0, "no answer")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        # the rules of verl's search_r1_like_qa_em
        ("<answer>Paris</answer>", 1.0),
        ("<think>London?</think><answer> the PARIS. </answer>", 1.0),
        ("<answer>London</answer> no, <answer>Paris</answer>", 1.0),  # the last counts
        ("<answer>Paris</answer> no, <answer>London</answer>", 0.1),
        ("Paris", 0.0),
        ("<answer>Paris", 0.0),
        ("<answer>Paris, France</answer>", 0.1),
        ("<answer>x</answer>" * 9 + "<answer>Paris</answer>", 1.0),  # ten tags
        ("<answer>x</answer>" * 10 + "<answer>Paris</answer>", 0.25),  # eleven
        ("</answer>" * 11 + "<answer>Paris</answer>", 0.25),
    ],
)
def test_search_r1(response: str, value: float) -> None:
    assert graded(search_r1(item(response, CAPITAL), format_score=0.1))[0] == value


def test_search_r1_substring() -> None:
    response = item("<answer>It is Paris, in France</answer>", CAPITAL)
    assert graded(search_r1(response)) == (0.0, "")
    assert graded(search_r1(response, substring=True)) == (1.0, "")
    assert graded(search_r1(item("<answer>London</answer>", CAPITAL), substring=True)) == (0.0, "")


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ("<think>a</think><answer>b</answer>", (1.0, "")),
        (" <think>\na\n</think>\n<answer>\nb\n</answer>\n", (1.0, "")),
        ("<think>a</think>b", (0.0, "missing tag")),
        ("<think>a</think><answer>b", (0.0, "missing tag")),
        ("<think>a</think><answer>b</answer><answer>c</answer>", (0.0, "repeated tag")),
        ("<answer>b</answer><think>a</think>", (0.0, "order")),
        ("<think>a<answer>b</answer></think>", (0.0, "order")),
        ("well <think>a</think><answer>b</answer>", (0.0, "text outside")),
        ("<think>a</think> so <answer>b</answer>", (0.0, "text outside")),
        ("<think>a</think><answer>b</answer> bye", (0.0, "text outside")),
        ("<think> </think><answer>b</answer>", (0.0, "empty part")),
        ("<think>a</think><answer>\n</answer>", (0.0, "empty part")),
    ],
)
def test_think_format(response: str, result: tuple[float, str]) -> None:
    assert graded(think_format(item(response))) == result


def test_think_format_where_the_prompt_opens_the_tag_and_without_answer() -> None:
    opened = "<|assistant|><think>\n"
    assert graded(think_format(item("a</think><answer>b</answer>", prompt=opened))) == (1.0, "")
    again = item("<think>a</think><answer>b</answer>", prompt=opened)
    assert graded(think_format(again)) == (0.0, "repeated tag")
    assert graded(think_format(item("<think>a</think> b"), answer=False)) == (1.0, "")
    assert graded(think_format(item("<think>a</think> "), answer=False)) == (0.0, "empty part")


def test_regex() -> None:
    assert regex(item("so 46"), pattern=r"\d+") == 1.0
    assert regex(item("so 46"), pattern=r"\d+", match="fullmatch") == 0.0
    assert regex(item("46"), pattern=r"\d+", match="fullmatch") == 1.0


@pytest.mark.parametrize(
    ("response", "penalty"),
    [
        ("a b c d", 0.0),  # 2 trigrams, both distinct
        ("a b c a b c", -2.0 * (1 - 3 / 4)),  # abc bca cab abc
        ("A b c a B c", -2.0 * (1 - 3 / 4)),
        ("la " * 5, -2.0 * (1 - 1 / 3)),
        ("a b", 0.0),
        ("", 0.0),
        ("我们我们我们", -2.0 * (1 - 2 / 4)),  # no spaces: characters; 我们我 们我们 我们我 们我们
    ],
)
def test_repetition(response: str, penalty: float) -> None:
    assert repetition(item(response), ngram=3, penalty=2.0) == pytest.approx(penalty)


def test_length_target() -> None:
    # 24 tokens too few, 24 too many
    assert length_target(item("", tokens=1000), tokens=1024) == pytest.approx(-0.0072)
    assert length_target(item("", tokens=1048, num_tokens="1024"), alpha=0.5) == -12.0
    assert length_target(item("", tokens=1024), tokens=1024) == 0.0
    with pytest.raises(ValueError, match=r"no extra_info\.num_tokens"):
        length_target(item(""))
    with pytest.raises(ValueError, match="a target of -1024 tokens"):
        length_target(item("", num_tokens="-1024"))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ('{"name": "Ada", "age": 36}', (1.0, "")),
        ('Here it is: {"name": "Ada", "age": 36}. Done.', (1.0, "")),
        ('{"name": 1, "age": 1} or rather {"name": "Ada", "age": 36}', (1.0, "")),
        ('{"name": "Ada", "age": 36} or rather {"name": 1, "age": 1}', (0.0, "invalid")),
        ('```json\n{"name": "Ada", "age": 36}\n```\nwhere [1] is a note', (1.0, "")),
        ('{"name": "Ada", "age": 36}\n```json\n{}\n```', (0.0, "invalid")),  # the last block counts
        ('[see below] {"name": "Ada", "age": 36}', (1.0, "")),
        ('{"name": "Ada", "age": 36.5}', (0.0, "invalid")),
        ('{"name": "Ada", "age": -1}', (0.0, "invalid")),
        ('{"name": "Ada", "age": 36, "id": 1}', (0.0, "invalid")),
        ('{"name": "Ada", "age": NaN}', (0.0, "no json")),
        ('{"name": "Ada", "age": 36', (0.0, "no json")),  # cut off
        ("{'name': 'Ada', 'age': 36}", (0.0, "no json")),
        ("", (0.0, "no json")),
        ('[{"name": "Ada", "age": 36}]', (0.0, "invalid")),
        ("[" * 100_000, (0.0, "too deep")),
        ('{"name": "a ```json block", "age": 36}', (1.0, "")),  # the whole response, not what it quotes
        ('{"name": "Ada", "age": 1e400}', (0.0, "invalid")),
    ],
)
def test_json_schema(response: str, result: tuple[float, str]) -> None:
    assert graded(json_schema(item(response), schema=PERSON)) == result


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400])
def test_a_number_beyond_floats_is_invalid_and_no_error(number: str) -> None:
    grade = json_schema(item(number), schema={"multipleOf": 0.5})
    assert grade == Grade(0.0, "invalid: a number is too large")


def test_json_schema_says_where(tmp_path: Path) -> None:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    bad = item('{"name": "Ada", "age": -1}')
    assert json_schema(bad, schema=str(file)) == Grade(0.0, "invalid: $.age: minimum")
    rows = item('{"name": "Ada", "age": -1}', schema='{"required": ["id"]}')
    assert json_schema(rows) == Grade(0.0, "invalid: $: required")


def test_a_schema_that_is_none_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no extra_info\.schema: add it, or set the parameter"):
        json_schema(item("{}"))
    with pytest.raises(ValueError, match=r"not a JSON schema: \$\.type: 'thing' is not valid"):
        json_schema(item("{}"), schema={"type": "thing"})
    with pytest.raises(FileNotFoundError):
        json_schema(item("{}"), schema=str(tmp_path / "absent.json"))


def test_a_schema_reaches_no_network() -> None:
    # a reserved address: requesting it would take longer and raise a different error
    with pytest.raises(Exception) as caught:  # noqa: PT011  jsonschema wraps it in a class of its own
        json_schema(item("{}"), schema={"$ref": "http://192.0.2.1/schema.json"})
    assert isinstance(caught.value, Unresolvable)


@pytest.mark.parametrize(
    ("text", "value"),
    [("46", 46), ('"x"', "x"), ("a {1} b [1, {}] c", [1, {}]), ('{"a": [1, 2', None), ("[1] [2, {}", [1])],
)
def test_last_json(text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(ValueError, match="Expecting"):
            last_json(text)
    else:
        assert last_json(text) == value


def test_what_is_wrong_with_data_sources_default_is_said_with_the_config() -> None:
    with pytest.raises(ValueError, match="'nope': no such function"):
        GraderConfig.model_validate({"name": "data_source", "default": "nope"})
    with pytest.raises(ValueError, match="regex needs pattern"):
        GraderConfig.model_validate({"name": "data_source", "default": "regex"})
    with pytest.raises(ValueError, match="expected another grader"):
        GraderConfig.model_validate({"name": "data_source", "default": "data_source"})


def test_the_pages_example_of_a_grader(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    code = page.split("```python\n# graders.py\n")[1].split("```")[0]
    (tmp_path / "graders.py").write_text(code)
    grade = load(GraderConfig.model_validate({"name": f"{tmp_path}/graders.py:close", "tolerance": 5.0}), {})
    assert graded(grade(item("44"))) == (pytest.approx(1 - 2 / 5), "")
    assert graded(grade(item("forty"))) == (0.0, "no number")
    assert graded(grade(item("1000"))) == (0.0, "")


MEGABYTE = 1_000_000
LONG = {
    "spaces": " " * MEGABYTE,
    "lines": "one two three four five\n" * (MEGABYTE // 24),
    "open tags": "<answer>" * (MEGABYTE // 8),
    "markers": "answer is " * (MEGABYTE // 10),
    "boxes": "\\boxed{" * (MEGABYTE // 7),
    "lists": "Answer: A" + " or" * (MEGABYTE // 3),
    "capitals": "Answer: " + "A " * (MEGABYTE // 2),
    "open arrays": "[1," * (MEGABYTE // 3),
    "open objects": '{"a": [' * (MEGABYTE // 7),
    "open strings": '["' * (MEGABYTE // 2),
    "escapes": '{"\\' * (MEGABYTE // 3),
    "hashes": "#### " * (MEGABYTE // 5),
    "less than": "<" * MEGABYTE,
    "backslashes": "\\a" * (MEGABYTE // 2),
    "characters": "我" * (MEGABYTE // 3),
}
TRUTHS = {"gsm8k": "46"}  # "B" for the others
PARAMETERS: dict[str, dict[str, Any]] = {
    "json_schema": {"schema": PERSON},
    "language_consistency": {"language": "de"},
    "regex": {"pattern": "x$"},
    "overlong": {"max_tokens": 8, "buffer": 2},
    "length_target": {"tokens": 8},
}
# their cases are in other test files
ELSEWHERE = {"maths", "data_source", *SANDBOXED}
LONG_ONES = {"language_consistency"}  # linear, but it takes seconds for all of them


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG_ONES else [])
        for name in GRADERS
        if name not in ELSEWHERE
    ],
)
def test_a_megabyte_takes_a_time_linear_in_it(name: str) -> None:
    config = GraderConfig.model_validate({"name": name, **PARAMETERS.get(name, {})})
    grade: Callable[..., float | Grade] = load(config, GRADERS)
    for kind, response in LONG.items():
        begun = time.process_time()
        value, _ = graded(grade(item(response, TRUTHS.get(name, "B"))))
        assert math.isfinite(value)
        seconds = time.process_time() - begun
        # what is linear takes up to 2 s here; what is not, minutes
        assert seconds < 20, f"{kind}: {seconds:.1f} s"


def test_a_grader_that_is_not_known_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="no such function; did you mean token_f1"):
        GraderConfig(name="token_f2")
