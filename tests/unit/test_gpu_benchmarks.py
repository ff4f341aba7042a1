"""benchmarks/gpu on a CPU, in tiny sizes: its logic, not its figures."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from atoll.weights.plan import plan
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, commits, kernels, training
from benchmarks.gpu.report import Row, markdown
from tests.torch_ranks import run_ranks

CPU = torch.device("cpu")
TINY = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "1"])
    assert gpu.main() == 2
    assert capsys.readouterr().out.startswith("no CUDA device is here")


def test_a_table_has_the_machine_and_a_section_for_each_part() -> None:
    assert markdown("an H100", {"6. Log-probabilities": [Row("H 896", "60.0 ms")]}) == (
        "an H100\n\n**6. Log-probabilities**\n\n| what | measured |\n|---|---|\n| H 896 | 60.0 ms |\n"
    )


def test_a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> list[Row]:
        raise RuntimeError("pytest ended with 1")

    monkeypatch.setattr(gpu, "PARTS", {1: ("Facts", part)})
    assert gpu.run(1) == [Row("failed", "RuntimeError: pytest ended with 1")]


def test_facts_name_the_attention_kernels() -> None:
    assert checks.chosen_attention(torch.float32, masked=False, device="cpu") in ("math", "flash")


def test_tests_are_counted_and_their_skips_explained(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no CuPy')\ndef test_c(): assert 0\n"
    )
    rows: list[Row] = []
    with pytest.raises(RuntimeError, match="pytest ended with 1"):
        rows.extend(checks.run_tests("test_it.py", folder=tmp_path))
    assert rows[0].value.startswith("1 failed, 1 passed, 1 skipped")
    assert rows[1].value.endswith("no CuPy")


def test_attention_takes_every_backend_that_shares_prefixes() -> None:
    rows = list(kernels.attention(CPU, torch.float32, num_trees=2, num_samples=3, prompt=20, longest=40))
    assert [row.what.partition(",")[0] for row in rows][:4] == ["shared_prefix"] * 4


def test_commits_change_what_is_decoded() -> None:
    rows = list(commits.commits(CPU, num_layers=2, hidden=16, seconds=0.05, dtype=torch.float32))
    assert rows[-1] == Row("outputs after a commit", "equal those of the new weights")


def test_four_layers_of_experts_have_many_transfers() -> None:
    source, target = commits.expert_layouts()
    # of each layer: gate, up and down of 128 experts, at least 4 matrices of attention, 4 norms, a router
    assert len(plan([source], [target], part_elements=1 << 40).transfers) > 4 * (3 * 128 + 9)
    held, wanted = (np.sum(layout.boxes["rows"] * layout.boxes["columns"]) for layout in (source, target))
    assert held == wanted


def single_process() -> list[str]:
    rows = list(kernels.logprobs(CPU, num_tokens=8, vocabulary=32, hidden_sizes=(16,), chunks=(64, 128)))
    torch.distributed.destroy_process_group()
    return [row.what for row in rows]


def test_logprobs_by_chunk() -> None:
    [names] = run_ranks(single_process, 1)
    assert names == [
        "H 16, chunks of 2^6 logits",
        "H 16, chunks of 2^7 logits",
        "H 16, whole logits",
        "H 16, the four matrix products alone",
    ]


def tiny_update() -> list[Row]:
    return list(training.update(CPU, TINY, response_tokens=4, dtype=torch.float32))


def test_an_update_with_random_weights() -> None:
    [rows] = run_ranks(tiny_update, 1)
    assert [row.what for row in rows] == [
        "parameters, tokens of an update",
        "update 0",
        "update 1",
        "update 2",
        "off-load, first",
        "off-load, second",
    ]
    assert rows[0].value.endswith(f", {4 * (512 + 16 * 4):,}")
