"""Samples that a run has kept, as users read them: from Python, on the console and as JSON lines."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.live import Live

from atoll.cli.main import main
from atoll.cli.samples import SamplePrinter
from atoll.config.schema import ConsoleSection
from atoll.runtime.dump import DumpFolder
from atoll.runtime.errors import UserError
from atoll.runtime.samples import SampleTurn, read_samples
from atoll.wire.info import RunStatus
from atoll.wire.types import (
    NEW_CONVERSATION,
    WHOLE,
    FinishReason,
    Group,
    GroupId,
    Message,
    Prompt,
    SampleId,
    ToolCall,
    TurnReward,
    Version,
)
from tests.builders import group, node, sample, sample_id
from tests.conftest import write_tokenizer

V3, V4 = Version("l", 3), Version("l", 4)


class Run:
    """A run's folder with a config and dumps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "toy"
        self.folder.mkdir()
        self.configure()
        self.dumps = DumpFolder(self.folder / "dumps", "all")

    def configure(self, mode: str = "train", dump: str | bool = "recent") -> None:
        model = self.folder.parent / "model"
        tree = {"run": {"mode": mode}, "coordinator": {"dump": dump}, "model": {"path": str(model)}}
        (self.folder / "config.json").write_text(json.dumps(tree))

    def write(self, step: int, groups: Sequence[Group]) -> None:
        asyncio.run(self.dumps.write_batch(step, V4, groups))

    def write_answers(self, name: str, step: int, groups: Sequence[Group]) -> None:
        asyncio.run(self.dumps.write_answers(name, step, V4, groups))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def scored(prompt: int, *scores: float, text: str = "2") -> Group:
    return group(
        *(sample(sample_id(prompt, i), node([3]), score=score, text=text) for i, score in enumerate(scores))
    )


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["samples", *map(str, words)]) == 0
    return capsys.readouterr().out


def shown_ids(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("toy/")]


def test_a_sample_has_texts_rewards_versions_and_lengths(run: Run) -> None:
    answer = sample(
        sample_id(7, 0),
        node([8, 10, 2], versions=[V3, V4, V4]),
        rewards=(
            TurnReward(0, 0.5, {"format": 0.5}, {"format": "no box"}),
            TurnReward(WHOLE, 1.25, {"format": 0.25, "exact": 1.0}),
        ),
        reason=FinishReason.LENGTH,
        text="46",
    )
    greedy = sample(sample_id(7, 1), node([9]), score=0.0)
    run.write(5, [group(answer, ids=[4, 5], baseline=greedy)])
    first, baseline = read_samples(run.folder)
    assert (first.step, first.set, first.id, first.group, first.index) == (5, None, "toy/0/7/0", "toy/0/7", 0)
    assert (first.prompt, first.response, first.ground_truth, first.data_source) == ("1+1=", "46", "2", "toy")
    assert (first.score, first.components) == (1.75, {"format": 0.75, "exact": 1.0})
    assert first.reasons == {"format": "no box"}
    assert (first.versions, first.num_prompt_tokens, first.num_tokens) == ((3, 4), 2, 3)
    assert (first.finish_reason, first.status, first.is_baseline) == ("length", "truncated", False)
    assert first.turns == (SampleTurn("", "46", None, "length", (3, 4), 3, 0.5, True),)
    assert (first.messages, first.extra) == ((), {})
    assert (baseline.id, baseline.is_baseline) == ("toy/0/7/1", True)


def tool_use() -> Group:
    """An agent's session: a call, the tool's output and an answer, and beside them a title."""
    nodes = (
        node([4, 13, 5], [0, 0, 0], parent=NEW_CONVERSATION),  # "1+2"
        node([25, 26], parent=0, versions=V3),
        node([7, 8], [0, 0], parent=1),  # "45"
        node([9], parent=2, versions=V4),
        node([30], [0], parent=NEW_CONVERSATION),  # a letter
        node([31, 32], parent=4, versions=V4),
    )
    played = sample(sample_id(2, 0), *nodes, rewards=(TurnReward(1, 0.25, {}), TurnReward(WHOLE, 1.0, {})))
    first, second, title = played.turns
    turns = (first._replace(text="call"), second._replace(text="6"), title._replace(text="t", untrained=True))
    messages = (
        Message("user", "1+2"),
        Message("assistant", "", (ToolCall("c", "add", '{"a": 1}'),)),
        Message("tool", "45", tool_call_id="c"),
        Message("assistant", "six"),
    )
    row = Prompt(sample_id(2).group, np.empty(0, np.int32), "1+2=", "3", "toy", agent="adder")
    return Group(row, (played._replace(turns=turns, messages=messages, reason="turns"),))


def test_a_session_is_read_turn_by_turn(run: Run, tmp_path: Path) -> None:
    run.write(1, [tool_use()])
    with pytest.raises(UserError, match=r"model: missing; its tokenizer decodes .*: call this in the dir"):
        read_samples(run.folder)
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (session,) = read_samples(run.folder)
    assert session.turns == (
        SampleTurn("1+2", "call", None, "stop", (3,), 2, 0.25, True),
        SampleTurn("45", "6", 0, "stop", (4,), 1, 0.0, True),
        SampleTurn("g", "t", None, "stop", (4,), 2, 0.0, False),
    )
    assert (session.response, session.score, session.reason) == ("six", 1.25, "turns")
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_a_session_is_printed_turn_by_turn(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(1, [tool_use()])
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    lines = printed(capsys, run.folder).splitlines()
    assert [line.split(maxsplit=1)[-1].rstrip() for line in lines[2:]] == [
        "0    2 tokens, version 3, stop, reward 0.25",
        "1+2",
        "call",
        "1    after turn 0, 1 tokens, version 4, stop",
        "45",
        "6",
        "2    2 tokens, version 4, stop, not trained on",
        "g",
        "t",
        "3",
        "5 tokens, versions 3, 4, turns",
    ]


def test_the_last_step_that_has_samples_is_the_default(run: Run) -> None:
    for step in (9, 10):
        run.write(step, [scored(step, 1.0)])
    validation = replace(scored(0, 0.5).prompt, id=GroupId.of_validation("toy", "sums", 4, 0))
    answer = sample(SampleId(validation.id, 0), node([3]), score=0.5)
    run.write_answers("sums", 8, [Group(validation, (answer,))])
    assert [each.id for each in read_samples(run.folder)] == ["toy/0/10/0"]
    assert [each.id for each in read_samples(str(run.folder), 9)] == ["toy/0/9/0"]
    (answered,) = read_samples(run.folder, set="sums")
    assert (answered.step, answered.set, answered.group) == (8, "sums", "toy/val/sums/4/0")


def test_what_is_not_there_is_named_with_what_is(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"toy holds no samples: none are finished yet"):
        read_samples(run.folder)
    for dump in ("none", False):
        run.configure(dump=dump)
        with pytest.raises(UserError, match=r'ran with coordinator.dump = "none"; set that to "recent" or'):
            read_samples(run.folder)
    run.configure(mode="supervised")
    with pytest.raises(UserError, match="a supervised run generates none"):
        read_samples(run.folder)
    for step in (3, 4, 5, 9):
        run.write(step, [scored(0, 1.0)])
    with pytest.raises(UserError, match=r"no samples of step 6, expected one of 3-5, 9; .*\"all\""):
        read_samples(run.folder, 6)
    with pytest.raises(UserError, match="holds no answers to validation sets"):
        read_samples(run.folder, set="sums")
    run.write_answers("sums", 5, [scored(0, 1.0)])
    with pytest.raises(UserError, match="no answers to a validation set 'sum', expected one of sums"):
        read_samples(run.folder, set="sum")
    with pytest.raises(UserError, match="contains no run: give a run's folder"):
        read_samples(tmp_path)


def test_some_of_each_group_the_worst_or_the_best_are_printed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(1, [scored(0, 0.5, -1.0), scored(1, 0.25, 2.0)])
    text = printed(capsys, run.folder)
    assert text.startswith("step 1, training: 3 of 4 samples; score 0.438 on average, -1 to 2\n")
    assert shown_ids(text) == ["toy/0/0/0", "toy/0/1/0", "toy/0/0/1"]
    assert shown_ids(printed(capsys, run.folder, "--worst", "-n", "2")) == ["toy/0/0/1", "toy/0/1/0"]
    assert shown_ids(printed(capsys, run.folder, "--best", "-n", "1")) == ["toy/0/1/1"]


def test_long_texts_lose_their_middle_and_control_characters_are_shown(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run.write(1, [scored(0, 1.0, text="[red]\x1b[2J" + "a" * 2000 + "end")])
    text = printed(capsys, run.folder)
    assert max(map(len, text.splitlines())) <= 80
    joined = "".join(line.strip() for line in text.splitlines())
    assert r"response  [red]\x1b[2J" + "a" * (600 - len("[red].[2J")) in joined
    assert "[... 812 characters ...]" in text.replace("\n          ", " ")
    assert "\x1b" not in text


def test_json_lines_are_complete(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.write(1, [scored(0, 0.5, 1.0, text="ä" * 5000)])
    rows = [json.loads(line) for line in printed(capsys, run.folder, "--jsonl", "--best").splitlines()]
    assert [(row["group"], row["index"], row["score"]) for row in rows] == [
        ("toy/0/0", 1, 1.0),
        ("toy/0/0", 0, 0.5),
    ]
    assert rows[0]["response"] == "ä" * 5000
    assert rows[0]["components"] == {"exact_match": 1.0}
    assert rows[0]["turns"][0]["finish_reason"] == "stop"


async def test_a_run_prints_samples_every_few_steps(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (4, 5, 11):
        await run.dumps.write_batch(step, V4, [scored(step, 1.0, 0.0)])
    printer = SamplePrinter(run.folder, ConsoleSection(samples=1, every=5))

    async def follow(state: str, step: int) -> str:
        printer.show(RunStatus("toy", state, step, 20, step, "", (), {}, step, ()))
        if printer.printing:
            await printer.printing
        return capsys.readouterr().out

    assert await follow("warming up", 9) == ""
    assert await follow("training", 4) == ""  # it resumes after this step
    assert shown_ids(await follow("training", 5)) == ["toy/0/5/0"]
    assert await follow("validating", 5) == ""
    assert shown_ids(await follow("training", 11)) == ["toy/0/11/0"]  # a status may skip steps
    assert "no samples of step 15: " in await follow("training", 15)  # which is no reason to end


async def test_samples_are_printed_above_a_live_display(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    await run.dumps.write_batch(1, V4, [scored(1, 1.0)])
    printer = SamplePrinter(run.folder, ConsoleSection(samples=1, every=1))
    screen = StringIO()
    with Live("progress", console=Console(file=screen, force_terminal=True), auto_refresh=False):
        for step in (0, 1):
            printer.show(RunStatus("toy", "training", step, 20, 1, "", (), {}, 1, ()))
        assert printer.printing is not None
        await printer.printing
    assert shown_ids(screen.getvalue()) == ["toy/0/1/0"]
    assert capsys.readouterr().out == ""
