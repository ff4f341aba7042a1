"""A neural reward model that real SGLang serves, asked through the `http` protocol's preset."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from atoll.external.protocols import connect
from atoll.runtime.ports import reserve_port
from atoll.wire.types import ExternalServer, FinishReason, Graded, GroupId, SampleId, ScoreItem
from tests.conftest import write_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]

PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
START_TIMEOUT_S = 120

PAIRS = (("12+34=", "46"), ("7+8=", "1"), ("1+1=", "2" * 40))


@pytest.fixture
def scorer(tiny_qwen2: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "scorer"
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_qwen2, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    # SGLang's head has a bias, which it leaves as it was allocated where the file has none
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.bias": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as port:
        yield port


@pytest.fixture
def url(scorer: Path, port: int) -> Iterator[str]:
    """Of a server that has said on its standard output that it is ready."""
    settings = "--is-embedding --device cpu --dtype float32 --max-total-tokens 4096 --grammar-backend none"
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", scorer, "--port", str(port)]
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["timeout", str(START_TIMEOUT_S + 60), *command, *settings.split(), "--host", "127.0.0.1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:  # ends where the server does
            said.append(line)
            if "ready to roll" in line:
                break
        assert process.poll() is None, "".join(said[-20:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def test_a_reward_model_served_by_sglang_scores_as_transformers_does(url: str, scorer: Path) -> None:
    items = [
        ScoreItem(SampleId(GroupId("toy", 0, 0), n), prompt, response, "", "toy", FinishReason.STOP, 3)
        for n, (prompt, response) in enumerate(PAIRS)
    ]
    client: Any = connect(ExternalServer("reward", "judge", url, "http", {"preset": "sglang"}), token=None)
    await client.probe()
    verdicts = await client.score(items)
    await client.close()
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    for item, verdict in zip(items, verdicts, strict=True):
        ids = tokenizer(item.prompt + item.response, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model(ids).logits.item()
        assert isinstance(verdict, Graded)
        assert verdict.id == item.id
        assert verdict.value == pytest.approx(expected, abs=1e-4)
