"""A reward model in a trainer-role service, asked as any other external reward server is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from atoll.cli.launch.launcher import trainer_group
from atoll.cli.launch.processes import Fleet
from atoll.config.load import write_resolved
from atoll.external.protocols import connect
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import UserError
from atoll.wire.types import (
    ExternalServer,
    FinishReason,
    Float32,
    Graded,
    GradingError,
    GroupId,
    SampleId,
    ScoreItem,
    Segments,
)
from tests.builders import run_config
from tests.conftest import write_tokenizer
from tests.tokens import TOKEN


def item(index: int, prompt: str, response: str) -> ScoreItem:
    return ScoreItem(
        SampleId(GroupId("toy", 0, 0), index), prompt, response, "46", "arithmetic", FinishReason.STOP, 3
    )


ITEMS = [item(0, "12+34=", "46"), item(1, "12+34=", "4"), item(2, "7+8=", "1515151515"), item(3, "1+1=", "")]


def server(url: str, **options: str) -> ExternalServer:
    return ExternalServer("reward", "judge", url, "trainer", options)


@pytest.fixture
def folder(tiny_qwen2: Path, tmp_path: Path) -> Path:
    """A scorer whose head tells responses apart."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_qwen2, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "scorer")
    write_tokenizer(tmp_path / "scorer")
    return tmp_path / "scorer"


@pytest.mark.long
async def test_it_scores_text_as_transformers_does(folder: Path, tiny_qwen2: Path, tmp_path: Path) -> None:
    config = run_config(run={"dir": tmp_path}, model={"path": tiny_qwen2}, reward_model={"path": folder})
    config.folder.mkdir()
    write_resolved(config, config.folder / "config.json")
    async with Fleet(tmp_path / "logs") as fleet:
        address = await fleet.start(trainer_group(config, "reward_model"))
        client = connect(server(f"grpc://{address}", tokenizer=str(folder)), token=TOKEN)
        assert await client.probe() == f"reward model {folder}"
        verdicts = await client.score(ITEMS)
        await client.close()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for asked, verdict in zip(ITEMS, verdicts, strict=True):
        ids = tokenizer(asked.prompt + asked.response, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            expected = model(ids["input_ids"]).logits.item()
        assert isinstance(verdict, Graded)
        assert verdict.id == asked.id
        assert verdict.value == pytest.approx(expected, abs=1e-5)
    assert len({verdict.value for verdict in verdicts if isinstance(verdict, Graded)}) == 4


async def test_a_score_that_is_no_number_costs_its_own_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compute_values(self: TrainerClient, segments: Segments) -> Float32:
        values_T = np.arange(len(segments.token_ids), dtype=np.float32)
        values_T[segments.offsets[2] - 1] = np.nan  # the last token of the second
        return values_T

    monkeypatch.setattr(TrainerClient, "compute_values", compute_values)
    client = connect(server("127.0.0.1:1", tokenizer=str(folder)), token=None)
    first, second, third, _ = await client.score(ITEMS)
    await client.close()
    # "12+34=46" and "12+34=4" and "7+8=1515151515", a character a token
    assert first == Graded(ITEMS[0].id, 7.0, {})
    assert second == GradingError(ITEMS[1].id, "judge", "got nan, expected a finite number", retryable=False)
    assert third == Graded(ITEMS[2].id, 28.0, {})


@pytest.mark.parametrize(
    ("options", "problem"),
    [({}, "tokenizer: Field required"), ({"tokenizer": "{}", "preset": "slime"}, "preset: Extra inputs")],
)
def test_it_takes_one_option(folder: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=f"options of protocol trainer: {problem}"):
        connect(server("127.0.0.1:1", **{k: v.format(folder) for k, v in options.items()}), token=None)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"option tokenizer: .*tokenizer.json: .*No such file"):
        connect(server("127.0.0.1:1", tokenizer=str(tmp_path)), token=None)


def test_whoever_registers_a_server_does_not_learn_which_files_there_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    for path in (tmp_path, tmp_path / "nothing"):
        registered = replace(server("127.0.0.1:1", tokenizer=str(path)), address="127.0.0.1")
        with pytest.raises(UserError, match=r"tokenizer\.json: it is not a readable tokenizer$"):
            connect(registered, token=None)
