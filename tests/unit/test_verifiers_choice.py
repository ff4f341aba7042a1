"""Multiple choice: what a response states, and what it only mentions."""

import json

import pytest

from atoll.reward.verifiers.choice import multiple_choice
from tests.unit.verifier_items import graded, item

TEXTS = json.dumps(["London", "Paris", "Rome", "Vitamin C"])

# the correct one of A to D is B
STATED = {
    "B": 1.0,
    "(B)": 1.0,
    " **B.** ": 1.0,
    "b": 1.0,
    "C": 0.0,
    "The answer is (B).": 1.0,
    "The correct answer is B, as 2 + 2 = 4.": 1.0,
    "The answer is option B because A is wrong": 1.0,
    "The answer is clearly B": 1.0,
    "The answer is b": 1.0,
    "Answer: B": 1.0,
    "Answer: $B": 1.0,
    "**Answer:** B": 1.0,
    "**Answer**: **B**": 1.0,
    "Final answer: C": 0.0,
    "The correct option is (B)": 1.0,
    "Answer:\n\nB": 1.0,
    "Answer: B\n\nA is wrong, since C": 1.0,
    r"\boxed{B}": 1.0,
    r"So $\boxed{\text{B}}$.": 1.0,
    r"\boxed{\textbf{(C)}}": 0.0,
    "答案是B": 1.0,
    "所以答案：C": 0.0,
    "Answer：B": 1.0,
    # it changes its mind
    "The answer is A. Wait, the answer is B.": 1.0,
    "The answer is B. Wait, the answer is A.": 0.0,
    "Answer: B. A prime number": 1.0,  # an article
    "Answer: B, as C is wrong": 1.0,
    "I compare them.\n(B) Paris": 1.0,
    "A. because\nB. of that": 1.0,  # the last line
}


@pytest.mark.parametrize("response", STATED)
def test_the_last_statement_counts(response: str) -> None:
    assert graded(multiple_choice(item(response, "B"))) == (STATED[response], "")


@pytest.mark.parametrize(
    "response",
    [
        "Answer: A or B",
        "Answer: A as well as B",
        "Answer: B or A",
        "Answer: A, B",
        "Answer: B/C",
        "Answer: B & C",
        "Answer: (A)(B)",
        "Answer: A B C D",
        "Answer: both A and B",
        "The answer is B, or perhaps C",
        r"\boxed{A, B}",
        r"\boxed{A} or \boxed{B}",
        r"\boxed{C}, \boxed{B}",
        "Answer: A\nAnswer: B",
    ],
)
def test_several_are_never_right(response: str) -> None:
    for truth in "ABCD":
        assert graded(multiple_choice(item(response, truth))) == (0.0, "several")


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Answer:",
        "ABCD",
        "Answer: ABCD",
        "I do not know",
        "The answer is not B",
        "The answer isn't B",
        "The answer is none of A, B",
        "Answer: E",
        "Band",
        "A dog ran home",
        "It could be B",  # a mention, no statement
        "Because B",
    ],
)
def test_no_answer(response: str) -> None:
    for truth in "ABCD":
        assert graded(multiple_choice(item(response, truth))) == (0.0, "no answer")


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ("The answer is Paris.", (1.0, "")),
        ("paris", (1.0, "")),
        ("Answer: B. Paris", (1.0, "")),
        ("B. London", (0.0, "several")),
        ("Answer: Vitamin C", (0.0, "")),  # D, not C
        ("The answer is Berlin", (0.0, "no answer")),
        ("Answer: B", (1.0, "")),
        ("Answer: E", (0.0, "no answer")),
    ],
)
def test_texts_of_the_choices(response: str, result: tuple[float, str]) -> None:
    assert graded(multiple_choice(item(response, "B", choices=TEXTS))) == result
    assert graded(multiple_choice(item(response, "Paris", choices=TEXTS))) == result


def test_choices_may_be_numbers() -> None:
    assert graded(multiple_choice(item("The answer is 8", "B", choices="[4, 8, 16]"))) == (1.0, "")


def test_ten_choices() -> None:
    assert graded(multiple_choice(item("The answer is J", "J"), choices=10)) == (1.0, "")
    assert graded(multiple_choice(item("Answer: B, I think", "B"), choices=10)) == (1.0, "")
    assert graded(multiple_choice(item("Answer: B, I", "B"), choices=10)) == (0.0, "several")


@pytest.mark.parametrize("truth", ["E", "Paris", "A or B", "", "1"])
def test_a_ground_truth_that_is_no_choice_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="expected one letter of ABCD"):
        multiple_choice(item("Answer: B", truth))


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("C is correct", 1.0),
        ("Thus, option C is correct.", 1.0),
        ("**C** is the correct answer.", 1.0),
        ("It is not B. (C) is correct", 1.0),
        ("B is correct", 0.0),
        ("A is correct", 0.0),
        ("B or C is correct", 0.0),
        ("C is not correct", 0.0),
        ("I doubt that C is correct", 0.0),
        ("Whether C is correct, I cannot say", 0.0),
        ("C is correct only for x > 0", 0.0),
    ],
)
def test_a_choice_that_is_called_correct(response: str, value: float) -> None:
    assert graded(multiple_choice(item(f"Let me see.\n{response}", "C")))[0] == value
