"""The maths grader on pairs judged by hand, on every GSM8K solution, and on expensive input."""

import gzip
import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.errors import ConfigError
from atoll.config.functions import GRADER, check
from atoll.reward.verifiers.gsm8k import extract_answer, gsm8k
from atoll.reward.verifiers.maths import Place, grade_quickly, maths
from atoll.reward.verifiers.maths_latex import canonical
from atoll.reward.verifiers.maths_numbers import TooLargeError, rational
from atoll.wire.types import FinishReason, Grade, GroupId, SampleId, ScoreItem

DATA = Path(__file__).parents[1] / "data"
KINDS = {"equal", "different", "no answer", "unbalanced box", "too long", "not a value", "unreadable"}
MAX_MISSES = 0.02  # fraction of the equal pairs


def item(response: str, truth: str) -> ScoreItem:
    sample = SampleId(GroupId("maths", 0, 0), 0)
    return ScoreItem(sample, "", response, truth, "", FinishReason.STOP, len(response))


def test_pairs_without_a_false_positive() -> None:
    pairs = [json.loads(line) for line in (DATA / "maths" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) >= 500
    assert 0.45 <= sum(pair["right"] for pair in pairs) / len(pairs) <= 0.55
    missed = []
    for pair in pairs:
        grade = maths(item(pair["response"], pair["gold"]))
        assert grade.reason.partition(":")[0] in KINDS
        assert grade.value == float(grade.reason == "equal")
        assert pair["right"] or grade.value == 0.0, pair
        if pair["right"] and grade.value == 0.0:
            missed.append(pair)
        assert grade_quickly(item(pair["response"], pair["gold"])) in (None, grade)
    assert len(missed) <= MAX_MISSES * sum(pair["right"] for pair in pairs), missed


def test_every_gsm8k_solution_and_the_next_ones() -> None:
    with gzip.open(DATA / "gsm8k" / "answers.jsonl.gz", "rt") as file:
        solutions = [json.loads(line) for line in file]
    assert len(solutions) == 8792
    truths = [solution.split("####")[1].strip() for solution in solutions]
    values = [Fraction(truth.replace(",", "")) for truth in truths]
    for i, solution in enumerate(solutions):
        following = (i + 1) % len(solutions)
        other, equal = solutions[following], float(values[i] == values[following])
        strict = extract_answer(solution)
        assert strict is not None
        assert gsm8k(item(solution, strict)) == 1.0
        assert gsm8k(item(other, strict)) == float(strict == extract_answer(other)) <= equal
        for place in ("any", "hash"):
            right, wrong = (grade_quickly(item(text, truths[i]), answer=place) for text in (solution, other))
            assert right is not None
            assert right.value == 1.0
            assert wrong is not None
            assert wrong.value == equal


@pytest.mark.parametrize(
    ("place", "response", "value", "reason"),
    [
        ("boxed", r"\boxed{5}", 1.0, "equal"),
        ("boxed", "Answer: 5", -1.0, "no answer: no box"),
        ("boxed", r"\boxed{5", -1.0, "unbalanced box"),
        ("boxed", r"\boxed{\text{5}", -1.0, "unbalanced box"),
        ("boxed", r"\boxed{" + "5" * 1001 + "}", -1.0, "too long: an answer of 1001 characters"),
        ("boxed", r"\boxed{x>5}", -1.0, "not a value: 5<x"),
        ("boxed", r"\boxed{" + "(" * 50 + "5" + ")" * 50 + "}", -1.0, "unreadable: too many brackets"),
        ("line", "Answer: 5", 1.0, "equal"),
        ("line", "ANSWER：$5$", 1.0, "equal"),
        ("line", r"Answer: $\boxed{5}$", 1.0, "equal"),
        ("line", "Answer: 6\nAnswer:\n5", 1.0, "equal"),
        ("line", "Answer: 5\nAnswer: 6", -1.0, "different"),
        ("line", r"\boxed{5}", -1.0, "no answer"),
        ("hash", "#### 5", 1.0, "equal"),
        ("hash", "#### 5\nand more", 1.0, "equal"),
        ("hash", "5", -1.0, "no answer: no ####"),
        ("any", "I cannot say.\nIt is late.", -1.0, "no answer"),
    ],
)
def test_places_and_reasons(place: Place, response: str, value: float, reason: str) -> None:
    """As DAPO has it: 1 or -1."""
    grade = maths(item(response, "5"), answer=place, wrong=-1.0)
    assert (grade.value, grade.reason) == (value, reason)


def test_a_place_that_is_not_known_is_refused_by_the_config() -> None:
    check(GRADER, "maths", {"answer": "line", "wrong": -1.0})
    with pytest.raises(ConfigError, match="expected Literal"):
        check(GRADER, "maths", {"answer": "box"})


def test_the_truth_may_be_a_solution() -> None:
    assert maths(item(r"\boxed{3/4}", r"Hence $x=\boxed{\frac34}$.")).value == 1.0
    assert maths(item(r"\boxed{1200}", "Add up.\n#### 1,200")).value == 1.0


@pytest.mark.parametrize("written", ["11,111,111", "11{,}111{,}111", r"11,\! 111,\! 111", r"11\, 111\, 111"])
def test_thousands_as_math_writes_them(written: str) -> None:
    assert maths(item(rf"\boxed{{{written}}}", "11111111")).value == 1.0
    assert maths(item(rf"\boxed{{{written}}}", "11111112")).value == 0.0


@pytest.mark.parametrize(
    ("written", "truth", "value"),
    [("100,200", "100, 200", 1.0), ("100,200", "100200", 1.0), ("100, 200", "100200", 0.0)],
)
def test_a_comma_without_a_space_may_be_of_a_list(written: str, truth: str, value: float) -> None:
    assert maths(item(rf"\boxed{{{written}}}", truth)).value == value


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        (r"\text{5 apples}", "5", 1.0),
        (r"\text{5 apples}", r"5\text{ apples}", 1.0),
        ("5", r"\text{5 apples}", 1.0),
        (r"\text{5 million}", "5000000", 1.0),
        (r"\text{6 apples}", "5", 0.0),
        (r"\text{5 million}", "5", 0.0),
        (r"\text{5 or so}", "5", 0.0),
        (r"\text{5 cm}", r"5\text{ m}", 0.0),
        (r"\text{5 apples}", r"\text{5 pears}", 0.0),
        (r"\text{5 PM}", r"\text{5 AM}", 0.0),
        (r"\text{5th}", "5", 0.0),
    ],
)
def test_a_unit_may_stand_in_one_text_with_its_number(answer: str, truth: str, value: float) -> None:
    assert maths(item(rf"\boxed{{{answer}}}", truth)).value == value


@pytest.mark.parametrize("truth", ["", " ", "$$", r"so \boxed{5"])
def test_a_row_without_a_truth_is_an_error_whatever_the_response(truth: str) -> None:
    for response in (r"\boxed{5}", "", "no box"):
        with pytest.raises(ValueError, match="ground truth"):
            maths(item(response, truth))


@pytest.mark.parametrize(
    "answer",
    [
        r"9^{9^{9^9}}",
        r"x^{9^{9^9}}",
        r"x_{9^{9^9}}",
        r"((9!)!)!",
        r"\sqrt{9^{9^{9}}}",
        r"\sin(10^{10^{10}})",
        r"(a+b+c+d)^{1000}",
        r"\binom{10^9}{5 \cdot 10^8}x",
        r"1e999999999x",
        r"2^{-2^{40}}\pi",
        r"\prod_{i=1}^{10^9} i",
        "9" * 900 + r"\pi",
        "(" * 400 + ")" * 400,
        "{" * 400 + "}" * 400,
        r"\frac" * 190,
        "1," * 490,
        " " * 990 + "x",
        "-" * 990,
        "2^" * 490 + "2",
        r"\sqrt{" * 150 + "2" + "}" * 150,
        "+".join([r"\sqrt{9^{4000}}"] * 60),
    ],
)
def test_bombs_cost_little(answer: str) -> None:
    begun = time.process_time()
    grade = maths(item(rf"\boxed{{{answer}}}", "5"))
    assert grade.value == 0.0
    assert time.process_time() - begun < 5.0  # at most 0.05 when idle, without the first import of SymPy


@pytest.mark.parametrize(
    "unit", [r"\boxed{", r"\boxed{5} ", "answer is ", "answer ", "#### ", "$", "{", " ", "\n", "Answer:\n"]
)
def test_long_responses_take_linear_time(unit: str) -> None:
    response = unit * (200_000 // len(unit))
    begun = time.process_time()
    grade_quickly(item(response, "6"))
    assert time.process_time() - begun < 5.0  # 0.1 at most when idle


# arithmetic as text and as its exact value, built side by side
_LEAVES = st.one_of(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n))),
    st.decimals("0", "99", places=2).map(lambda d: (str(d), Fraction(d))),
    st.tuples(st.integers(0, 99), st.integers(1, 99)).map(
        lambda pair: (rf"\frac{{{pair[0]}}}{{{pair[1]}}}", Fraction(*pair))
    ),
)


def _grown(inner: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        pairs.map(lambda p: (f"({p[0][0]} - {p[1][0]})", p[0][1] - p[1][1])),
        pairs.map(lambda p: (rf"({p[0][0]})\cdot({p[1][0]})", p[0][1] * p[1][1])),
        pairs.filter(lambda p: p[1][1] != 0).map(
            lambda p: (rf"\frac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])
        ),
        inner.map(lambda x: (f"({x[0]})^2", x[1] ** 2)),
        inner.map(lambda x: (rf"\sqrt{{({x[0]})^{{2}}}}", abs(x[1]))),
        inner.map(lambda x: (f"(-({x[0]}))", -x[1])),
    )


@settings(max_examples=60)
@given(st.recursive(_LEAVES, _grown, max_leaves=8))
def test_arithmetic_is_exact(expression: tuple[str, Fraction]) -> None:
    text, value = expression
    assert rational(canonical(text)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3\\frac{1}{2}", Fraction(7, 2)),
        ("-3\\frac{1}{2}", Fraction(-7, 2)),
        ("3(4)", 12),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("12.\\overline{34}", Fraction(1222, 99)),
        ("8^{2/3}", 4),
        ("\\binom{5}{2}", 10),
        ("3!!", None),  # the double factorial
        ("(3!)!", 720),
        ("10^{-2}", Fraction(1, 100)),
        ("2^{3^2}", 512),
        ("2^3^2", None),
        ("\\sqrt{2}", None),
        ("\\sqrt{0}", 0),
        ("\\sqrt{1}", 1),
        ("\\sqrt{99980001}", 9999),
        ("\\sqrt{99980002}", None),
        ("\\sqrt[3]{27^{100}/8}", Fraction(3**100, 2)),
        ("\\sqrt[64]{2^{64}}", 2),
        ("\\sqrt[3]{-8/27}", Fraction(-2, 3)),
        ("(-8)^{2/3}", 4),
        ("\\sqrt[4]{-16}", None),
        ("\\sqrt[64]{2^{64}-1}", None),
        ("1/0", None),
        ("0^0", None),
        ("3 4", None),
        ("3\\frac{5}{2}", None),
        ("", None),
        (".", None),
    ],
)
def test_arithmetic_by_hand(text: str, value: Fraction | int | None) -> None:
    assert rational(text) == value


@pytest.mark.parametrize("text", ["2^{20000}", "1e99999", "1001!", "\\binom{2000}{2}", "2^{2^{20}}"])
def test_what_is_too_large_is_refused(text: str) -> None:
    with pytest.raises(TooLargeError):
        rational(text)


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        ("(A) 5", "A", 1.0),
        ("(A) 5", "5", 1.0),
        ("(B) 5", "A", 0.0),
        ("(A)(B)", "A", 0.0),
        ("(A) or (B)", "A", 0.0),
        ("(A)+5", "A", 0.0),
        ("2^.5", r"\sqrt{2}", 1.0),
        ("2^.5", "2", 0.0),
        ("5.", "5", 1.0),
        ("5...", "5", 0.0),  # an unfinished decimal
        ("1,2,3,...", "1,2,3", 0.0),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2", 1.0),  # 1 * 4 - 2 * 3
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix} = -2", "-2", 1.0),
        (r"\begin{vmatrix}1&2&3\\4&5&6\\7&8&10\end{vmatrix}", "-3", 1.0),  # 1 * 2 - 2 * (-2) + 3 * (-3)
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "2", 0.0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2", 0.0),
        (r"17 \bmod 5 = 2", "2", 1.0),
        (r"17 \bmod 5 = 3", "3", 0.0),
        (r"1 + 16 \bmod 5", "2", 0.0),  # unclear of what
        (r"x \equiv 2 \bmod 5", "2", 0.0),
        (r"\lim_{x\to 0} \frac{\sin x}{x} = 1", "1", 1.0),
        (r"\lim_{x\to 0} \frac{\sin x}{x} = 2", "1", 0.0),
        (r"\lim_{x\to 0} x", "0", 0.0),  # nobody worked it out
        (r"\gcd(12, 18) = 6", "6", 1.0),
    ],
)
def test_answers_that_were_missed_or_accepted_wrongly(answer: str, truth: str, value: float) -> None:
    assert maths(item(rf"\boxed{{{answer}}}", truth)).value == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"so it is \boxed 3", 1.0),
        (r"so $\boxed 3$ is it.", 1.0),
        (r"\boxed{3}, no, \boxed 4", 0.0),
        (r"\boxed 3 or 4", 0.0),
        ("We add.\nThe result is $3$", 1.0),
        ("We add.\nThe result is not $3$", 0.0),
        ("The answer is 3...", 0.0),
    ],
)
def test_statements_that_were_missed_or_accepted_wrongly(response: str, value: float) -> None:
    assert maths(item(response, "3")).value == value


@pytest.mark.parametrize(
    ("response", "value", "reason"),
    [
        ("Answer: 5", 1.0, "equal"),
        (r"\boxed{5}", 1.0, "equal"),
        (r"\boxed 5", 1.0, "equal"),
        ("\\boxed{6}\nAnswer: 5", 1.0, "equal"),  # the line is preferred
        ("Answer: 6\n\\boxed{5}", -1.0, "different"),
        ("5", -1.0, "no answer: no box"),
    ],
)
def test_verls_rule_for_dapo(response: str, value: float, reason: str) -> None:
    grade = maths(item(response, "5"), answer="line_or_boxed", wrong=-1.0)
    assert (grade.value, grade.reason) == (value, reason)


def test_towers_are_refused_whatever_their_bases() -> None:
    towers = [
        "e^{e^{e^{e^{e^{x}}}}}",
        "x^{x^{x^{x^{x}}}}",
        "e^{e^{e^{e^x}}}",
        r"\exp(\exp(\exp(\exp(x))))",
        r"e^{\sinh(e^{\exp{x}})}",
    ]
    for tower in towers:
        reason = "unreadable: more than 3 nested exponentials"
        assert maths(item(rf"\boxed{{{tower}}}", "x^2")) == Grade(0.0, reason)
    assert maths(item(r"\boxed{e^{e^{x}} e^x}", "e^{x+e^x}")).value == 1.0  # what people do write


def test_a_truth_that_no_answer_can_equal_is_an_error() -> None:
    with pytest.raises(ValueError, match="got an answer of 1001 characters, expected 1000 at most"):
        maths(item(r"\boxed{5}", "5" * 1001))
