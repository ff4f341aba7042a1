"""What `atoll data` writes, read back by transformers and by our own data source."""

import json
import re
from itertools import zip_longest
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from atoll.agents.sandbox_calls import parse_files
from atoll.cli.data import SAMPLE
from atoll.cli.main import main
from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.cli.tasks.coding import build_coding
from atoll.cli.tasks.gsm8k import build_gsm8k
from atoll.cli.tasks.guess import build_guess
from atoll.config.load import load
from atoll.config.schema import TokenLimit
from atoll.coordinator.data.dataset_rows import Dataset, read_rows, read_supervised_rows
from atoll.coordinator.data.datasets import read_prompts, read_sequences
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Renderer
from atoll.wire.types import Message

EXAMPLES = Path(__file__).parents[2] / "examples"
POSITIONS = TokenLimit("max_position_embeddings", 1024)


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    build_arithmetic(out, seed=1)
    return out


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gsm8k")
    build_gsm8k(SAMPLE, out, seed=1)
    return out


def test_arithmetic_rows_are_right_and_disjoint(arithmetic: Path) -> None:
    questions: dict[str, set[str]] = {}
    for name, count in (("train", 7594), ("validation", 506)):
        rows = read_rows(Dataset(arithmetic / f"{name}.parquet"))
        assert len(rows) == count
        for row in rows:
            match = re.fullmatch(r"([1-9]\d)\+([1-9]\d)=", row.messages[0].content)
            assert match is not None
            assert int(match[1]) + int(match[2]) == int(row.ground_truth)
        questions[name] = {row.messages[0].content for row in rows}
        assert len(questions[name]) == count
    assert not questions["train"] & questions["validation"]
    warmup = read_supervised_rows(Dataset(arithmetic / "warmup.parquet"))
    answers = {row.messages[0].content: row.messages[1].content for row in warmup}
    assert answers.keys() == questions["train"]
    assert all(eval(question[:-1]) == int(answer) for question, answer in answers.items())


def test_arithmetic_prompts_are_plain_text(arithmetic: Path) -> None:
    renderer = Renderer(arithmetic / "model")
    prompt = read_prompts(Dataset(arithmetic / "train.parquet"), renderer, "toy")[0]
    # <pad> 0, <eos> 1, <unk> 2, digit d is 3 + d, + is 13, = is 17
    a, b = prompt.text[:2], prompt.text[3:5]
    assert prompt.token_ids.tolist() == [3 + int(d) for d in a] + [13] + [3 + int(d) for d in b] + [17]
    assert (renderer.eos_id, renderer.stop_ids, renderer.vocab_size) == (1, (1,), 64)
    ids, mask = read_sequences(Dataset(arithmetic / "warmup.parquet"), renderer, POSITIONS, "refuse")[0]
    assert mask.tolist() == [False] * 6 + [True] * (len(ids) - 6)
    assert ids[-1] == 1


def parameters_of_qwen2(vocab: int, hidden: int, inner: int, layers: int, kv: int) -> int:
    attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv  # q, o; k, v; biases
    return 2 * vocab * hidden + hidden + layers * (attention + 3 * hidden * inner + 2 * hidden)


@pytest.mark.parametrize(
    ("task", "num_parameters"),
    [
        ("arithmetic", parameters_of_qwen2(vocab=64, hidden=128, inner=512, layers=4, kv=64)),
        # no biases, two norms of 32 a layer
        ("gsm8k", parameters_of_qwen2(2048, 128, 384, 4, 64) + 4 * (2 * 32 - 128 - 2 * 64)),
    ],
)
def test_transformers_loads_the_model(task: str, num_parameters: int, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(task) / "model"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    assert model.num_parameters() == num_parameters
    assert model.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:  # five standard errors
            deviation = model.config.hidden_size**-0.5
            error = 5 * deviation / parameter.numel() ** 0.5
            assert abs(parameter.mean().item()) < error
            assert abs(parameter.std().item() - deviation) < error
    assert model.config.initializer_range == pytest.approx(model.config.hidden_size**-0.5)


def test_gsm8k_rows(gsm8k: Path) -> None:
    for name, count in (("train", 200), ("test", 50)):
        lines = (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = read_rows(Dataset(gsm8k / f"{name}.parquet"))
        assert len(rows) == count
        for line, row in zip(lines, rows, strict=True):
            problem = json.loads(line)
            assert row.messages == [
                Message(
                    "user",
                    problem["question"]
                    + ' Let\'s think step by step and output the final answer after "####".',
                )
            ]
            assert row.ground_truth == problem["answer"].rpartition("#### ")[2].replace(",", "")
            assert row.extra["answer"] == problem["answer"]
    columns = pq.read_schema(gsm8k / "train.parquet").names
    assert columns == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    for row in read_supervised_rows(Dataset(gsm8k / "warmup.parquet")):
        response = row.messages[-1].content
        assert "<<" not in response
        assert re.search(r"\n#### [-0-9.,]+$", response)


def test_gsm8k_tokenizer_is_lossless_and_agrees_with_transformers(gsm8k: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(gsm8k / "model")
    renderer = Renderer(gsm8k / "model")
    for prompt in read_prompts(Dataset(gsm8k / "test.parquet"), renderer, "toy"):
        messages = [{"role": "user", "content": prompt.text.split("\n", 1)[1].split("<|im_end|>")[0]}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompt.token_ids.tolist() == expected
        assert reference.decode(prompt.token_ids) == prompt.text
        assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    (part,) = renderer.encode_parts(["1234 é 漢"], are_first=False)
    assert reference.convert_ids_to_tokens(part.ids[:4]) == ["1", "2", "3", "4"]
    assert reference.decode(part.ids) == "1234 é 漢"
    assert renderer.stop_ids == (reference.eos_token_id,)


@pytest.mark.parametrize("task", ["arithmetic", "gsm8k"])
def test_a_seed_gives_the_same_files(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first = request.getfixturevalue(task)
    assert main(["data", task, "--out", str(tmp_path / "same"), "--seed", "1"]) == 0
    assert main(["data", task, "--out", str(tmp_path / "other"), "--seed", "2"]) == 0
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 8
    assert all((first / file).read_bytes() == (tmp_path / "same" / file).read_bytes() for file in files)
    weights = Path("model/model.safetensors")
    assert (first / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


@pytest.mark.parametrize(("digits", "sums"), [(1, 81), (6, 8100)])
def test_sums_of_other_lengths(tmp_path: Path, digits: int, sums: int) -> None:
    build_arithmetic(tmp_path, seed=0, digits=digits)
    rows = [
        *read_rows(Dataset(tmp_path / "train.parquet")),
        *read_rows(Dataset(tmp_path / "validation.parquet")),
    ]
    questions = {row.messages[0].content for row in rows}
    assert len(questions) == len(rows) == sums
    assert all(re.fullmatch(rf"[1-9]\d{{{digits - 1}}}\+[1-9]\d{{{digits - 1}}}=", q) for q in questions)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', r"line 2: expected an object with question and answer, got KeyError: 'answer'"),
        ("{", "line 2: expected an object with question and answer, got JSONDecodeError"),
        ('{"question": "a", "answer": "12"}', 'line 2: field answer does not end in "#### number"'),
    ],
)
def test_a_bad_source_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        build_gsm8k(tmp_path, tmp_path / "out", seed=0)


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
def test_the_examples_use_what_is_written(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(EXAMPLES / f"{name}.toml")
    (tmp_path / "runs" / "data").mkdir(parents=True)
    (tmp_path / "runs" / "data" / name).symlink_to(request.getfixturevalue(name))
    monkeypatch.chdir(tmp_path)
    renderer = Renderer(config.model.path)
    for path in [*(s.path for s in config.data.train), *(s.path for s in config.validation.sets)]:
        longest = max(len(prompt.token_ids) for prompt in read_prompts(Dataset(path), renderer, "toy"))
        assert longest <= config.data.max_prompt_tokens
    longest_sequence = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    assert longest_sequence <= config.rollout.local.max_length
    assert config.warmup.source is not None
    assert read_sequences(Dataset(config.warmup.source.path), renderer, POSITIONS, "refuse")


def test_functions_to_mend_are_broken_and_their_tests_are_right(tmp_path: Path) -> None:
    build_coding(tmp_path, seed=1)
    names: dict[str, set[str]] = {}
    for part, count in (("train", 126), ("validation", 18)):
        rows = read_rows(Dataset(tmp_path / f"{part}.parquet", agent="coder"))
        assert len(rows) == count
        names[part] = {row.messages[0].content.split()[1] for row in rows}
        for row in rows:
            source = parse_files(row.extra["files"])["mine.py"]
            asserts = json.loads(row.ground_truth)
            operator = asserts[0].split()[-2]
            mended = re.sub(r"a . b", f"a {operator} b", source)
            scope: dict[str, object] = {}
            exec("\n".join([mended, *asserts]), scope)
            with pytest.raises(AssertionError):
                exec("\n".join([source, *asserts]), scope)
            assert f"(7, 3), {eval(f'7 {operator} 3')})" in parse_files(row.extra["files"])["test_mine.py"]
    assert not names["train"] & names["validation"]


def test_games_are_of_other_ranges_and_shown_by_a_player_who_obeys(tmp_path: Path) -> None:
    build_guess(tmp_path, seed=1)
    games: dict[str, set[tuple[int, int, int]]] = {}
    for part, count in (("train", 6160), ("validation", 140)):  # of 880 and 20 ranges of 7 numbers
        rows = read_rows(Dataset(tmp_path / f"{part}.parquet", agent="player"))
        assert len(rows) == count
        states = [json.loads(row.extra["environment"]) for row in rows]
        assert all(state["guesses"] == 3 for state in states)
        games[part] = {(state["low"], state["high"], state["secret"]) for state in states}
        assert len(games[part]) == count
        assert all(low <= secret <= high == low + 6 for low, high, secret in games[part])
    ranges = {part: {f"guess\n{low}-{high}" for low, high, _ in found} for part, found in games.items()}
    assert not ranges["train"] & ranges["validation"]
    shown = read_supervised_rows(Dataset(tmp_path / "warmup.parquet"))
    assert {row.messages[0].content for row in shown} == ranges["train"]
    for row in shown:
        low, high = map(int, row.messages[0].content.removeprefix("guess\n").split("-"))
        for reply, told in zip_longest(row.messages[1::2], row.messages[2::2]):
            guess = int(reply.content)
            assert low <= guess <= high
            if told is not None:
                low, high = (guess + 1, high) if told.content == "higher" else (low, guess - 1)
