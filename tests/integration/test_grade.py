"""`atoll grade`: a file's responses, graded by a function of one's own and by built-in graders."""

import json
from pathlib import Path

import pytest

from atoll.cli.main import main

GRADER = """
from atoll import Grade, ScoreItem

def close(item: ScoreItem, *, tolerance: float = 10.0) -> float | Grade:
    if item.response == "broken":
        return float(item.extra["level"])
    if not item.response:
        return Grade(0.0, "no number")
    return 1 - abs(float(item.response) - float(item.ground_truth)) / tolerance
"""
ROWS = [
    {"prompt": "12+34=", "answer": 46, "response": "46"},
    {"prompt": "12+34=", "answer": "46", "response": "44"},
    {
        "prompt": "12+34=",
        "ground_truth": "46",
        "response": "",
        "score": 0.0,
    },  # as `atoll samples --jsonl` has it
    {"prompt": "12+34=", "reward_model": {"ground_truth": "46"}, "response": "broken", "extra_info": {}},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("g.py").write_text(GRADER)
    Path("all.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    Path("good.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:2]))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_function_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "g.py:close", "all.jsonl", "--set", "tolerance=5", "-n", "2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "row 0       1.000  -                               46",
        "row 1       0.600  -                               44",  # 1 - 2 / 5
        "4 rows, 1 with an error; score 0.533 on average, 0 to 1",  # 1.6 / 3
        "  g.py:close 0.533",
        "  error: KeyError: 'level' (g.py:6): 1",
        "  no number: 1",
    ]


@pytest.mark.usefixtures("folder")
def test_responses_as_files_of_a_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "exact_match", "good.jsonl", "--set", "file=answer.txt", "-n", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "2 rows, 0 with an error; score 0.500 on average, 0 to 1"
    )


@pytest.mark.usefixtures("folder")
def test_lines_of_json_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "g.py:close", "all.jsonl", "--jsonl"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"row": 0, "score": 1.0, "components": {"g.py:close": 1.0}, "reason": ""},
        {"row": 1, "score": 0.8, "components": {"g.py:close": 0.8}, "reason": ""},
        {"row": 2, "score": 0.0, "components": {"g.py:close": 0.0}, "reason": "no number"},
        {"row": 3, "error": "KeyError: 'level' (g.py:6)", "retryable": False},
    ]
    assert main(["grade", "maths", "good.jsonl", "--set", "wrong=-1.0", "--jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["score"] for row in rows] == [1.0, -1.0]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["g.py:clos", "all.jsonl"], "no function 'clos'; it defines close"),
        (["math", "all.jsonl"], "did you mean maths?"),
        (["g.py:close", "all.jsonl", "--set", "toleranc=5"], "did you mean tolerance?"),
        (["server:judge", "all.jsonl"], "atoll conformance URL --items FILE"),
        (["g.py:close", "none.jsonl"], "none.jsonl: no such dataset"),
        (["g.py:close", "bare.jsonl"], "row 0 (the first is 0): field response: missing"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bare.jsonl").write_text('{"prompt": "12+34=", "answer": 46}\n')
    assert main(["grade", *words]) == 2
    assert problem in capsys.readouterr().err
