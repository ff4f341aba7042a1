"""Datasets to prompts: formats, refusals, mixtures, resuming."""

import hashlib
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.config.errors import ConfigError
from atoll.config.schema import LocalEngineConfig, TokenLimit
from atoll.coordinator.data.dataset_rows import (
    Dataset,
    DatasetRow,
    SupervisedRow,
    read_rows,
    read_supervised_rows,
)
from atoll.coordinator.data.datasets import (
    Cursor,
    Mixture,
    PromptSource,
    SupervisedSource,
    read_prompts,
    read_sequences,
)
from atoll.coordinator.run_data import _dataset, read_data
from atoll.runtime.dump import write_dump
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Renderer
from atoll.wire.types import GroupId, Message, Prompt, ToolCall
from tests.builders import V0, model_spec, run_config
from tests.conftest import write_tokenizer


def record(question: str, answer: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 7, "hint": None, "terms": [1, 2]},
    }
    return row | changes


def sums(n: int) -> list[dict[str, Any]]:
    return [record(f"{i}+1=", str(i + 1)) for i in range(n)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return path


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        write_jsonl(path, records)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".py":
        path.write_text(f"ROWS = {records!r}\n\ndef rows(*, skip=0):\n    yield from ROWS[skip:]\n")
        return path.with_name(f"{path.name}:rows")
    else:
        from datasets import Dataset

        Dataset.from_list(records).save_to_disk(path, num_shards=2)
    return path


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"vocab_size": 64}')
    return Renderer(folder)


def longest(tokens: int) -> TokenLimit:
    return TokenLimit("data.max_prompt_tokens", tokens)


def source(renderer: Renderer, *paths: Path, weights: tuple[float, ...] = (), **changes: Any) -> PromptSource:
    settings: dict[str, Any] = {"run": "toy", "seed": 3, "shuffle": True, "longest": longest(64)}
    settings |= {"overlong": "refuse"} | changes
    return PromptSource(
        [Dataset(path) for path in paths], weights or [1.0] * len(paths), renderer, **settings
    )


FORMATS = ["rows.parquet", "rows.jsonl", "rows.json", "rows", "rows.py"]
VERL = {"ground_truth": "the grader data_source", "data_source": "the grader data_source"}


def rows_of(path: Path, **settings: Any) -> list[DatasetRow]:
    """Of a run with the grader data_source, which reads all that verl's rows have."""
    return read_rows(Dataset(path, **({"required": VERL} | settings)))


def answers_of(path: Path) -> list[SupervisedRow]:
    return read_supervised_rows(Dataset(path))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [record("12+34=", "46"), record("é\u2028=", "0"), record("5+5=", "10")])
    rows = rows_of(path)
    assert [row.messages for row in rows] == [
        [Message("user", text)] for text in ("12+34=", "é\u2028=", "5+5=")
    ]
    assert [row.ground_truth for row in rows] == ["46", "0", "10"]
    assert {row.data_source for row in rows} == {"arithmetic"}
    # graders read text: other values as JSON, missing ones not at all
    assert rows[0].extra == {"split": "train", "index": "7", "terms": "[1, 2]"}


@pytest.mark.parametrize("name", FORMATS)
def test_several_right_answers_reach_graders_as_json(tmp_path: Path, name: str) -> None:
    """As in verl's rows of Search-R1."""
    truth = {"style": "rule", "ground_truth": {"target": ["Röntgen", "W. Röntgen"]}}
    rows = rows_of(write(tmp_path / name, [record("Who?", "", reward_model=truth)] * 2))
    assert {row.ground_truth for row in rows} == {'{"target": ["Röntgen", "W. Röntgen"]}'}


@pytest.mark.parametrize("name", FORMATS)
def test_warmup_rows_need_prompt_and_response_only(tmp_path: Path, renderer: Renderer, name: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "response": str(i + 1)} for i in range(5)]
    path = write(tmp_path / name, rows)
    draws = SupervisedSource(
        [read_sequences(Dataset(path), renderer, longest(64), "refuse")], [1.0], seed=0, shuffle=True
    ).draw(10)
    sequences = Counter((tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in draws)
    # ids of tests/conftest.py: digit d is 3 + d, + is 13, = is 17; <eos> 1 ends a response
    assert sequences == {((3 + i, 13, 4, 17, 4 + i, 1), (False,) * 4 + (True,) * 2): 2 for i in range(5)}


USER = {"role": "user", "content": "1+1="}
ASKED = Message("user", "1+1=")
ANSWERS = {"ground_truth": "the grader exact_match"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"prompt": "1+1=", "answer": "2"}, "2"),
        ({"prompt": "1+1=", "answer": 2}, "2"),
        ({"prompt": "1+1=", "answer": 2.0}, "2"),  # pandas' integers beside missing ones
        ({"prompt": "1+1=", "answer": 0.5}, "0.5"),
        ({"prompt": [USER], "answer": ["2", "two"]}, '["2", "two"]'),
        ({"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": 2}}, "2"),  # verl's hellaswag
        ({"prompt": [USER], "reward_model": {"ground_truth": "2"}, "answer": "it is 2"}, "2"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}], "answer": "2"}, "2"),
        ({"prompt": "1+1=", "answer": "2", "images": [], "agent_name": None, "difficulty": 3}, "2"),
    ],
)
def test_rows_for_graders(tmp_path: Path, name: str, row: dict[str, Any], truth: str) -> None:
    path = write(tmp_path / name, [row] * 2)
    assert rows_of(path, required=ANSWERS) == [DatasetRow([ASKED], truth, "", {})] * 2


def test_a_number_of_numpy_is_a_number(tmp_path: Path) -> None:
    code = "import numpy\ndef rows():\n    return [{'prompt': '1+1=', 'answer': numpy.int64(2)}]\n"
    (tmp_path / "mine.py").write_text(code)
    assert rows_of(tmp_path / "mine.py:rows", required=ANSWERS)[0].ground_truth == "2"


def test_rows_need_only_what_a_grader_reads(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1="}, {"prompt": "2+2=", "answer": ""}])
    assert [row.ground_truth for row in rows_of(path, required={})] == ["", ""]
    with pytest.raises(
        UserError, match=r"row 0 .*answer or .*: missing, and the grader exact_match reads it"
    ):
        rows_of(path, required=ANSWERS)


@pytest.mark.parametrize(
    ("graders", "required"),
    [
        (["maths"], {"ground_truth": "the grader maths"}),
        (["data_source"], VERL),
        ([{"name": "data_source", "default": "maths"}], {"ground_truth": "the grader data_source"}),
        (["server:judge", "length_cost", "examples/own_functions.py:close"], {}),
    ],
)
def test_a_run_knows_what_its_graders_read(graders: list[object], required: dict[str, str]) -> None:
    config = run_config(reward={"graders": graders}, data={"train": [{"path": "rows.jsonl"}]})
    assert _dataset(config, config.data.train[0]).required == required


def test_rows_of_an_agent_that_brings_its_reward_need_no_truth() -> None:
    agent = {"name": "search", "function": "examples/agents.py:calculator", "reward": "session"}
    train = [{"path": "rows.jsonl", "agent": "search"}, {"path": "other.jsonl"}]
    config = run_config(data={"train": train}, agents=[agent])
    required = [_dataset(config, source).required for source in config.data.train]
    assert required == [{}, {"ground_truth": "the grader exact_match"}]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_for_an_agent_keep_verls_fields_of_agents(tmp_path: Path, name: str) -> None:
    info = {
        "index": 7,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "2"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "1+1=", "ground_truth": "2"},
    }
    rows = [record("1+1=", "2", agent_name="tool_agent", extra_info=info)] * 2
    assert rows_of(write(tmp_path / name, rows), agent="search")[1].extra == {
        "index": "7",
        "need_tools_kwargs": "true",
        "tools_kwargs": '{"calc": {"create_kwargs": {"ground_truth": "2"}}}',
        "interaction_kwargs": '{"name": "gsm8k", "query": "1+1=", "ground_truth": "2"}',
        "agent_name": "tool_agent",
    }


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("columns", "extra"),
    [
        ({"tools": ["add", "search"]}, {"tools": '["add", "search"]'}),
        ({"tools": [SCHEMA]}, {"tools": json.dumps([SCHEMA])}),
        ({"tools": json.dumps([SCHEMA])}, {"tools": json.dumps([SCHEMA])}),
        ({"environment": {"seed": 3, "walls": [[0, 1]]}}, {"environment": '{"seed": 3, "walls": [[0, 1]]}'}),
        ({"environment": '{"seed":3}'}, {"environment": '{"seed": 3}'}),
        ({"tools": ["add"], "extra_info": {"tools": ["add"]}}, {"tools": '["add"]'}),
        ({"extra_info": {"environment": {"seed": 3}}}, {"environment": '{"seed": 3}'}),
        ({"tools": [], "environment": None}, {}),
    ],
)
def test_what_only_an_agent_reads_reaches_it_as_json(
    tmp_path: Path, name: str, columns: dict[str, Any], extra: dict[str, str]
) -> None:
    path = write(tmp_path / name, [{"prompt": "1+1=", **columns}] * 2)
    assert [row.extra for row in rows_of(path, agent="search", required={})] == [extra] * 2


def test_keys_that_parquet_fills_in_are_dropped(tmp_path: Path) -> None:
    """A column has the keys of all its rows."""
    rows = [{"prompt": "1", "environment": state} for state in ({"seed": 1}, {"walls": {"x": 1}})]
    path = write(tmp_path / "rows.parquet", rows)
    extras = [row.extra for row in rows_of(path, agent="search", required={})]
    assert extras == [{"environment": '{"seed": 1}'}, {"environment": '{"walls": {"x": 1}}'}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"tools": ["a"], "extra_info": {"tools": ["b"]}},
            "field tools: got another value than extra_info.tools; remove one of them",
        ),
        ({"tools": [3]}, r"field tools\[0\]: got int 3, expected {\"type\": \"function\", .* or a name"),
        ({"environment": [1]}, r"field environment: got list \[1\], expected an object, or its JSON text"),
        ({"environment": "{"}, "field environment: got str '{', expected an object, or its JSON text"),
        ({"extra_info": {"tools_kwargs": 3}}, r"field extra_info\.tools_kwargs: got int 3, expected an obj"),
        ({"agent_name": 3}, "field agent_name: got int 3, expected a string"),
    ],
)
def test_a_bad_row_for_an_agent(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1=", **columns}])
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 0 .*{message}"):
        rows_of(path, agent="search", required={})


ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "response": "2"},  # verl
        {"messages": [USER, ASSISTANT]},
        {"prompt": "1+1=", "completion": "2"},  # TRL
        {"prompt": [USER], "completion": [ASSISTANT]},
    ],
    ids=["response", "messages", "completion", "conversation"],
)
def test_rows_with_answers(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    path = write(tmp_path / name, [row] * 2)
    assert answers_of(path) == [SupervisedRow([ASKED, Message("assistant", "2")], [False, True], [])] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [USER]},
            r"no message to learn: after the first, none has .* in learn = \['assistant'\]",
        ),
        ({"messages": [ASSISTANT, USER]}, "field messages: got no message to learn"),
        ({"prompt": "1+1="}, r"field response: missing; the row has \['prompt'\], expected \{.*\{\"messages"),
        ({"prompt": "1+1=", "completion": [USER]}, "field completion: got no message to learn"),
        ({"prompt": "1+1=", "response": "2", "images": ["x.png"]}, "field images is not supported"),
        (
            {"messages": [USER, ASSISTANT], "tools": [{"name": "x"}]},
            r"field tools\[0\]: got dict {'name': 'x'}, expected {\"type\": \"function\", \"function\"",
        ),
        ({"messages": [USER, ASSISTANT], "tools": ["x"]}, r"field tools\[0\]: got str 'x', expected {\"type"),
        ({"messages": [USER, ASSISTANT], "environment": {"seed": 1}}, "field environment is not supported"),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0.5}]},
            r"field messages\[1\]\.weight: got float 0.5, expected 0 or 1",
        ),
    ],
)
def test_a_bad_row_with_answers(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"messages": [USER, ASSISTANT, USER, ASSISTANT]}
    path = write_jsonl(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 1 \(the first is 0\): .*{message}"):
        answers_of(path)


def test_an_overlong_answer_names_the_row_of_its_file(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"prompt": "1+1=", "response": "2" * 60}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    limit = TokenLimit("the model's max_position_embeddings", 64)
    match = r"row 1 .*prompt and answers: got 65 tokens .* at most the model's max_.* = 64; shorten it"
    with pytest.raises(UserError, match=match):
        read_sequences(Dataset(path), renderer, limit, "refuse")
    # without a template, nothing shows the end of an answer: each is a sequence of its own
    assert len(read_sequences(Dataset(path), renderer, limit, "filter")) == 2


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    ],
}
BAD = {
    "missing": (
        lambda r: r.pop("data_source"),
        r"field data_source: missing, and the grader data_source reads it; the row has \['ability', 'extra.*"
        r'expected \{"prompt": TEXT .*see docs/data\.md',
    ),
    "missing inside": (
        lambda r: r["reward_model"].pop("ground_truth"),
        "field answer or reward_model.ground_truth: missing, and the grader data_source reads it",
    ),
    "wrong type": (
        lambda r: r.update(reward_model="46"),
        "field reward_model: got str '46', expected an object",
    ),
    "no right answer": (
        lambda r: r["reward_model"].update(ground_truth=[]),
        r"got list \[\], expected text, a number or a list of answers",
    ),
    "no number": (lambda r: r["reward_model"].update(ground_truth=math.nan), "got float nan, expected text"),
    "number as prompt": (lambda r: r.update(prompt=12), "field prompt: got int 12, expected a list"),
    "no prompt": (lambda r: r.pop("prompt"), r"field prompt: missing; the row has \['ability', 'data_source"),
    "no message": (lambda r: r.update(prompt=[]), "field prompt: got an empty list"),
    "no role": (
        lambda r: r["prompt"][0].pop("role"),
        r"field prompt\[0\].role: missing",
    ),
    "empty": (lambda r: r["prompt"][0].update(content=""), r"field prompt\[0\].content: got an empty string"),
    "extra": (lambda r: r.update(extra_info=[1]), r"field extra_info: got list \[1\], expected an object"),
    "images": (lambda r: r.update(images=[{"bytes": ""}]), "field images is not supported: .* text only"),
    "image part": (
        lambda r: r["prompt"][0].update(content=[{"type": "image"}, {"type": "text", "text": "?"}]),
        r"field prompt\[0\]\.content\[0\]: got dict {'type': 'image'}, expected {\"type\": \"text\"",
    ),
    "agent": (
        lambda r: r.update(agent_name="tool_agent"),
        "field agent_name is not supported: .* set data.train.agent",
    ),
    "tools": (
        lambda r: r["extra_info"].update(tools_kwargs={"calc": {}}),
        r"field extra_info\.tools_kwargs is not supported: .* set data.train.agent",
    ),
    "interaction": (
        lambda r: r["extra_info"].update(interaction_kwargs={"name": "gsm8k"}),
        r"field extra_info\.interaction_kwargs is not supported: .* set data.train.agent",
    ),
    "environment": (
        lambda r: r.update(environment={"seed": 1}),
        "field environment is not supported: .* set data.train.agent",
    ),
    "reasoning": (
        lambda r: r["prompt"].append({"role": "assistant", "content": "2", "reasoning_content": "1 + 1"}),
        r"field prompt\[1\]\.reasoning_content is not supported: expected role and content",
    ),
    "no call": (
        lambda r: r["prompt"].append({"role": "assistant", "content": "", "tool_calls": [{}]}),
        r"field prompt\[1\]\.tool_calls\[0\]: got dict {}, expected {\"type\": \"function\", \"function\"",
    ),
    "call without arguments": (
        lambda r: r["prompt"].append(
            CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}
        ),
        r"tool_calls\[0\]\.function\.arguments: got str '1', expected an object, or its JSON text",
    ),
    "call of a user": (
        lambda r: r["prompt"].append(CALLED | {"role": "user"}),
        r"field prompt\[1\]\.tool_calls: got role 'user', expected them of the assistant only",
    ),
    "empty without calls": (
        lambda r: r["prompt"].append({"role": "assistant", "content": ""}),
        r"field prompt\[1\]\.content: got an empty string",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_names_file_row_and_field(tmp_path: Path, case: str) -> None:
    spoil, message = BAD[case]
    rows = sums(4)
    spoil(rows[2])
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 2 \(the first is 0\): .*{message}"):
        rows_of(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows"])
def test_a_column_that_is_missing(tmp_path: Path, name: str) -> None:
    rows = sums(3)
    for row in rows:
        del row["reward_model"]
    with pytest.raises(
        UserError,
        match=rf"{name}, row 0 .*reward_model.ground_truth: missing.*has \['ability', .*, 'prompt'\]",
    ):
        rows_of(write(tmp_path / name, rows))


def test_a_parquet_row_without_its_field(tmp_path: Path) -> None:
    rows = sums(3)
    del rows[1]["reward_model"]["ground_truth"]  # Parquet stores it as null
    with pytest.raises(UserError, match=r"rows\.parquet, row 1 .*reward_model\.ground_truth: missing"):
        rows_of(write(tmp_path / "rows.parquet", rows))


def test_a_broken_json_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", sums(3))
    path.write_text(path.read_text() + '{"data_source": arith\n')
    with pytest.raises(
        UserError, match=r"rows\.jsonl, row 3 .*line 4 is not valid JSON: Expecting value: .*column 17"
    ):
        rows_of(path)
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"row 0 .*got list \[1\], expected one JSON object a line"):
        rows_of(path)


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", sums(2))
    path.write_text(path.read_text() + "\n  \n")
    assert len(rows_of(path)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "1"}\n{"prompt": "2"}',
            r"Extra data: line 2 .*a file with one row per line is named \.jsonl",
        ),
        ('{"prompt": "1"}', r"got dict .*, expected one array of rows"),
        ("[1]", r"row 0 .*got int 1, expected a JSON object"),
    ],
)
def test_json_that_holds_no_rows(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=message):
        rows_of(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [['prompt']]", r"row 0 .*got list \['prompt'\], expected a dict"),
        ("return None", r"raised TypeError after 0 rows: 'NoneType'"),
        ("yield {'prompt': '1+1='}; {}['x']", r"raised KeyError after 1 rows: 'x' \(.*mine\.py, line 2\)"),
        ("raise SystemExit(1)", "raised SystemExit after 0 rows: 1"),
    ],
)
def test_a_function_that_gives_no_rows(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(UserError, match=rf"mine\.py:rows.* {message}"):
        rows_of(tmp_path / "mine.py:rows", required={})


def test_rows_of_a_function_with_parameters(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "mine.py", sums(5))
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    train = [{"path": path, "skip": 3}]
    rollout = {"local": {"max_length": 512}}
    prompts = read_data(run_config(model={"path": tmp_path}, data={"train": train}, rollout=rollout)).prompts
    assert prompts is not None
    assert sorted(prompt.text for prompt in prompts.draw(2)) == ["3+1=", "4+1="]
    # a resumed run is refused if the function returns other rows
    same, other = source(renderer, path), source(renderer, write(tmp_path / "mine.py", sums(6)[1:]))
    with pytest.raises(UserError, match="the same number of rows as before, but different ones"):
        other.load(same.cursor)


def test_only_as_many_rows_are_read_as_asked_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*sums(2), {}])
    assert len(rows_of(path, max_rows=2)) == 2


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_an_empty_dataset(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(sums(1)).slice(0, 0), path)
    else:
        path.write_text("")
    for read in (read_rows, read_supervised_rows):
        with pytest.raises(UserError, match="the dataset is empty: got 0 rows, expected at least 1"):
            read(Dataset(path))


def test_paths_that_hold_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such dataset"):
        rows_of(tmp_path / "absent.parquet")
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"got suffix '\.csv', expected \.parquet, \.jsonl"):
        rows_of(tmp_path / "rows.csv")
    (tmp_path / "rows.parquet").write_text("PAR?")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        rows_of(tmp_path / "rows.parquet")
    with pytest.raises(
        UserError, match=r"state\.json is missing; name one of its 1 data files, .*/rows\.parquet"
    ):
        rows_of(tmp_path)


def test_an_id_of_the_hub_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        rows_of(Path("openai/gsm8k"))
    assert str(raised.value).splitlines()[1:] == [
        "  hf download --repo-type dataset openai/gsm8k --local-dir data/gsm8k",
        'and set path to one of its data files (path = "data/gsm8k" names them)',
    ]
    (tmp_path / "openai").mkdir()  # a folder of the user's: the path may be misspelled
    with pytest.raises(UserError, match="no such dataset; correct the path"):
        rows_of(Path("openai/gsm8k"))


def test_a_folder_of_splits_says_which(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(sums(2)), test=Dataset.from_list(sums(1))).save_to_disk(
        tmp_path / "d"
    )
    with pytest.raises(UserError, match=r"splits \['train', 'test'\]; name one of them, such as .*d/train"):
        rows_of(tmp_path / "d")
    assert len(rows_of(tmp_path / "d" / "train")) == 2


def test_prompts_carry_what_graders_and_engines_need(tmp_path: Path, renderer: Renderer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record("1+1=", "2"), record("12+34=", "46")])
    prompt = read_prompts(Dataset(path), renderer, "toy", first=5)[1]
    assert prompt.id == GroupId("toy", 0, 6)
    assert prompt.token_ids.tolist() == [4, 5, 13, 6, 7, 17]
    assert (prompt.text, prompt.ground_truth, prompt.data_source) == ("12+34=", "46", "arithmetic")
    assert prompt.extra["index"] == "7"


def test_rows_for_an_agent_have_messages_instead_of_tokens(tmp_path: Path, renderer: Renderer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record("1+1=", "2"), record("123456+1=", "123457")])
    other = write_jsonl(tmp_path / "other.jsonl", sums(1))
    datasets = [Dataset(path, agent="search"), Dataset(other)]
    settings: dict[str, Any] = {"run": "toy", "seed": 3, "shuffle": False, "overlong": "refuse"}
    prompts = PromptSource(datasets, [1, 1], renderer, longest=longest(8), **settings).draw(4)
    long = prompts[2]
    assert (long.id.prompt, long.agent, long.text, long.ground_truth) == (1, "search", "123456+1=", "123457")
    assert long.messages == (Message("user", "123456+1="),)
    assert long.token_ids.tolist() == []
    plain = prompts[1]
    assert (plain.id.prompt, plain.agent, plain.messages) == (2, "", ())
    assert plain.token_ids.tolist() == [3, 13, 4, 17]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("arguments", "carried"),
    [({"a": 1, "b": 1}, '{"a": 1, "b": 1}'), ('{"a":1, "b":1}', '{"a":1, "b":1}')],
)
def test_rows_may_begin_with_calls_of_tools(
    tmp_path: Path, name: str, arguments: object, carried: str
) -> None:
    """For graders, the model's template writes them into the prompt's text."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "so", "tool_calls": [call | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]
    path = write(tmp_path / name, [{"prompt": messages}] * 2)
    expected = (
        ASKED,
        Message("assistant", "", (ToolCall("c1", "add", carried),)),
        Message("tool", "2", tool_call_id="c1"),
        Message("assistant", "so", (ToolCall("c2", "add", carried),)),
        Message("tool", "", tool_call_id="c2"),
    )
    text = '[user]1+1=[assistant]add{"a": 1, "b": 1}[tool]2[assistant]soadd{"a": 1, "b": 1}[tool]'
    for_agent, plain = (
        read_prompts(Dataset(path, agent=agent), Renderer(tmp_path), "toy")[1] for agent in ("search", "")
    )
    assert (for_agent.messages, for_agent.text, for_agent.token_ids.size) == (expected, text, 0)
    assert (plain.messages, plain.text) == ((), text)
    assert plain.token_ids.size > 0


def test_a_template_that_shows_no_calls(tmp_path: Path, renderer: Renderer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [USER, CALLED]}])
    with pytest.raises(UserError, match=r"row 0 .*field prompt: the chat template does not show .* of add"):
        read_prompts(Dataset(path), renderer, "toy")


def test_a_cursor_tells_rows_of_an_agent_apart_and_older_ones_of_plain_rows_stay_valid(
    tmp_path: Path, renderer: Renderer
) -> None:
    def digests(agent: str, *rows: dict[str, Any]) -> tuple[str, ...]:
        path = write_jsonl(tmp_path / "rows.jsonl", list(rows))
        settings: dict[str, Any] = {"run": "toy", "seed": 3, "shuffle": True, "overlong": "refuse"}
        datasets = [Dataset(path, agent=agent)]
        return PromptSource(datasets, [1], renderer, longest=longest(64), **settings).cursor.digests

    def expected(*parts: bytes) -> tuple[str]:
        whole = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return (hashlib.blake2b(whole, digest_size=8).hexdigest(),)

    row = record("1+1=", "2")
    ids = b"".join(number.to_bytes(4, "little") for number in (4, 13, 4, 17))
    assert digests("", row) == expected(ids, b"2", b"arithmetic")
    assert digests("search", row) == expected(b"1+1=", b"2", b"arithmetic")
    reset = row | {"environment": {"seed": 3}}
    assert digests("search", reset) == expected(b"1+1=", b"2", b"arithmetic", b'{"seed": 3}')


def test_each_epoch_draws_every_row_once_in_its_own_order(tmp_path: Path, renderer: Renderer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", sums(20))
    prompts = source(renderer, path).draw(60)
    epochs = [[p.id.prompt for p in prompts[start : start + 20]] for start in (0, 20, 40)]
    assert [p.id.epoch for p in prompts] == [0] * 20 + [1] * 20 + [2] * 20
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(20))]}) == 4
    assert all(p.ground_truth == str(p.id.prompt + 1) for p in prompts)


def test_order_depends_on_the_seed_and_can_be_the_files(tmp_path: Path, renderer: Renderer) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", sums(20))

    def order(**changes: Any) -> list[int]:
        return [p.id.prompt for p in source(renderer, path, **changes).draw(40)]

    assert order() == order()
    assert order() != order(seed=4)
    assert order(shuffle=False) == [*range(20), *range(20)]


def test_weights_are_shares_of_the_draws_at_every_moment(tmp_path: Path, renderer: Renderer) -> None:
    small = write_jsonl(
        tmp_path / "small.jsonl", [record(f"{i}*1=", str(i), data_source="small") for i in range(3)]
    )
    large = write_jsonl(tmp_path / "large.jsonl", sums(50))
    draws = source(renderer, small, large, weights=(3, 1)).draw(80)
    taken = 0
    for n, prompt in enumerate(draws, start=1):
        taken += prompt.data_source == "small"
        assert abs(taken - 0.75 * n) < 1
    # numbers count over both files; an epoch counts draws of that very row
    assert {p.id.prompt for p in draws if p.data_source == "small"} == {0, 1, 2}
    assert {p.id.prompt for p in draws if p.data_source != "small"} <= set(range(3, 53))
    assert max(p.id.epoch for p in draws if p.data_source == "small") == 19  # 60 draws of 3 rows
    assert len({p.id for p in draws}) == 80


def key(prompt: Prompt) -> tuple[GroupId, list[int], str]:
    return prompt.id, prompt.token_ids.tolist(), prompt.ground_truth


@pytest.mark.parametrize("stop", [0, 1, 19, 20, 21, 57])
def test_a_cursor_continues_identically(tmp_path: Path, renderer: Renderer, stop: int) -> None:
    paths = [write_jsonl(tmp_path / "a.jsonl", sums(13)), write_jsonl(tmp_path / "b.jsonl", sums(7))]
    unbroken = [key(p) for p in source(renderer, *paths, weights=(2, 1)).draw(90)]
    first = source(renderer, *paths, weights=(2, 1))
    before = [key(p) for p in first.draw(stop)]
    second = source(renderer, *paths, weights=(2, 1))
    second.load(Cursor.parse(first.cursor.dump()))
    after = [key(p) for size in (1, 16, 90 - stop - 17) for p in second.draw(size)]
    assert before + after == unbroken


def test_a_prompt_is_found_again_by_its_id(tmp_path: Path, renderer: Renderer) -> None:
    paths = [write_jsonl(tmp_path / "a.jsonl", sums(3)), write_jsonl(tmp_path / "b.jsonl", sums(7))]
    prompts = source(renderer, *paths)
    for drawn in prompts.draw(30):
        assert key(prompts.prompt(drawn.id)) == key(drawn)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"seed": 4}, "run.seed is 4, not 3"),
        ({"shuffle": False}, "data.shuffle is False, not True"),
        ({"rows": sums(21)}, r"the datasets have \[21\] rows that are short enough, not \[20\]"),
        (
            {"rows": sums(21)[1:]},
            "the datasets have the same number of rows as before, but different ones; restore",
        ),
        (
            {"rows": [*sums(19), record("19+1=", "21")]},
            "the same number of rows as before, but different ones",
        ),
    ],
    ids=["seed", "shuffle", "number", "prompts", "truth"],
)
def test_a_cursor_of_other_data_is_refused(
    tmp_path: Path, renderer: Renderer, change: dict[str, Any], refusal: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", sums(20))
    cursor = source(renderer, path).cursor
    source(renderer, path).load(cursor)
    write_jsonl(path, change.pop("rows", sums(20)))
    with pytest.raises(UserError, match=f"cannot resume the data: .*{refusal}"):
        source(renderer, path, **change).load(cursor)


def test_overlong_prompts_are_refused_or_filtered(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*sums(3), record("123456+1=", "123457"), *sums(2)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        UserError, match=r"row 3 .*got 9 tokens .* at most data\.max_prompt_tokens = 8; raise"
    ):
        source(renderer, path, longest=longest(8))
    assert len(source(renderer, path, longest=longest(9)).draw(6)) == 6
    filtered = source(renderer, path, longest=longest(8), overlong="filter")
    assert "left out 1 of 6 rows of more than 8 tokens" in caplog.text
    # the numbers of the rows that stay do not move
    assert sorted(p.id.prompt for p in filtered.draw(5)) == [0, 1, 2, 4, 5]
    with pytest.raises(UserError, match="the longest of 6 over-long rows"):
        source(renderer, path, longest=longest(2), overlong="filter")


@pytest.mark.parametrize("table", ["train", "sets"])
def test_a_prompt_that_a_replica_would_refuse_is_refused_at_the_start(tmp_path: Path, table: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    short = write_jsonl(tmp_path / "short.jsonl", sums(3))
    long = write_jsonl(tmp_path / "long.jsonl", [*sums(3), record("123456+1=", "123457")])
    paths = {"train": short, "sets": short} | {table: long}
    config = run_config(
        model={"path": tmp_path},
        data={"train": [{"path": paths["train"]}]},
        validation={"sets": [{"name": "sums", "path": paths["sets"]}]},
        rollout={"local": {"max_length": 9}, "sampling": {"max_new_tokens": 8}},
    )
    with pytest.raises(UserError, match=r"long.*row 3.*got 9 .*rollout.local.max_length - 1 = 8"):
        read_data(config)
    rollout = config.rollout.model_copy(update={"local": LocalEngineConfig(max_length=10)})
    assert read_data(config.model_copy(update={"rollout": rollout})).validation_sets


def test_a_prompt_longer_than_the_models_positions_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the local engine, whose sequences are by default as long as the model takes."""
    monkeypatch.setattr("atoll.coordinator.run_data.read_spec", lambda folder: model_spec(max_positions=9))
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    path = write_jsonl(tmp_path / "long.jsonl", [*sums(3), record("123456+1=", "123457")])
    config = run_config(model={"path": tmp_path}, data={"train": [{"path": path}]})
    with pytest.raises(UserError, match=r"row 3.*got 9 .*the positions of the local engine - 1 = 8"):
        read_data(config)


def test_a_prompt_that_the_template_refuses(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    )
    rows = [record("1", "1"), record("2", "2", prompt=[{"role": "system", "content": "x"}])]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        UserError, match=r"row 1 .*field prompt: the chat template refuses the messages: no system prompt"
    ):
        read_prompts(Dataset(path), Renderer(tmp_path), "toy")
    with pytest.raises(UserError, match=r"row 0 .*field prompt: '' has no token"):
        read_prompts(Dataset(write_jsonl(path, rows[:1])), Renderer(tmp_path), "toy")


def test_a_draw_is_cheap() -> None:
    mixture = Mixture([5000, 2000, 100], [5, 2, 1], seed=0, shuffle=True)
    mixture.draw(16)
    start = time.process_time()
    for _ in range(100):
        mixture.draw(16)
    assert (time.process_time() - start) / 1600 < 50e-6  # about 2 microseconds on an idle machine


def test_a_replay_of_fewer_dumps_than_the_run_has_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        write_dump(tmp_path / "dumps", step, V0, [])
    config = {"model": {"path": tmp_path}, "data": {"replay": tmp_path / "dumps"}}
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    for steps in (1, 2):
        data = read_data(run_config(config, run={"mode": "train_only", "steps": steps}))
        assert [path.name for path in data.replay] == ["step-000001.pb", "step-000002.pb"][:steps]
    with pytest.raises(UserError, match=r"dumps holds 2 dumps, run\.steps = 3 needs as many: lower"):
        read_data(run_config(config, run={"mode": "train_only", "steps": 3}))
    (tmp_path / "dumps" / "step-000001.pb").unlink()
    with pytest.raises(
        UserError,
        match=r"holds dumps of steps 2 to 2, run\.steps = 1 needs those of steps 1 to 1: .*dump = \"all\"",
    ):
        read_data(run_config(config, run={"mode": "train_only", "steps": 1}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"path": "rows.jsonl", "wieght": 2},
            r"dataset rows\.jsonl: wieght: unknown key; did you mean weight\?",
        ),
        ({"path": "{mine}:rows", "split": "test"}, r"data\.train: .*mine\.py:rows has no parameter 'split'"),
        ({"path": "{mine}:rows", "skip": "3"}, r"skip = '3' \(str\), expected int"),
        ({"path": "{mine}:of_item"}, r"got `def of_item\(item\)`, expected .*: keyword-only parameters"),
        ({"path": "{mine}:absent"}, r"no function 'absent'; it defines rows, of_item"),
    ],
)
def test_a_dataset_is_checked_with_the_config(tmp_path: Path, source: dict[str, Any], message: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def rows(*, skip: int = 0):\n    yield\n\n\ndef of_item(item):\n    pass\n")
    source["path"] = source["path"].format(mine=mine)
    with pytest.raises(ConfigError, match=message):
        run_config(data={"train": [source]})
