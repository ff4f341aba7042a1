"""What the local engine saves, which no result shows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from atoll.rollout.engines.local_decoder import Decoder
from atoll.rollout.engines.local_model import LocalModel
from atoll.rollout.engines.local_weights import BufferLayout
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import Sampling, TurnId, TurnRequest, Version
from tests.builders import group_id, sample_id, turn_request


class CountingModel(LocalModel):
    """Records the sizes of its calls."""

    def __init__(self, folder: Path) -> None:
        spec = read_spec(folder)
        layout = BufferLayout(spec)
        super().__init__(spec, layout.bind(layout.read(folder, torch.float32)), 512)
        self.prefills: list[int] = []
        self.decodes: list[int] = []

    def prefill(self, tokens_PS, lengths_P):
        self.prefills.append(len(tokens_PS))
        return super().prefill(tokens_PS, lengths_P)

    def decode(self, cache, tokens_B, positions_B, longest):
        self.decodes.append(len(tokens_B))
        return super().decode(cache, tokens_B, positions_B, longest)


def request(row: int, num_samples: int, num_tokens: int, length: int = 6) -> TurnRequest:
    prompt = [3 + row % 40] * length
    return turn_request(
        prompt, group=group_id(row), indices=range(num_samples), sampling=Sampling(num_tokens)
    )


def run(folder: Path, slots: int, requests: list[TurnRequest]) -> tuple[CountingModel, int]:
    model = CountingModel(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoder: Decoder[str] = Decoder(model, tokenizer, slots, 512, Version("", 0))
    decoder.submit(requests, "caller")
    finished = 0
    with torch.inference_mode():
        while decoder.num_rows or decoder.num_waiting:
            finished += len(decoder.step(admit=True))
    return model, finished


def test_a_group_is_prefilled_once_even_where_it_gets_slots_one_by_one(tiny_qwen2):
    model, finished = run(tiny_qwen2, 3, [request(0, 8, 5)])
    assert finished == 8
    assert model.prefills == [1]


def test_a_groups_greedy_sample_shares_its_prefill(tiny_qwen2):
    sampled = request(0, 8, 5)
    greedy = replace(sampled, ids=(TurnId(sample_id(0, 8), 0),), sampling=Sampling(5, temperature=0.0))
    model, finished = run(tiny_qwen2, 16, [sampled, greedy, request(1, 2, 5)])
    assert finished == 11
    assert model.prefills == [2]


def test_waiting_groups_are_prefilled_together(tiny_qwen2):
    model, _ = run(tiny_qwen2, 16, [request(row, 4, 5, length=2 + row) for row in range(4)])
    assert model.prefills == [4]
    assert model.decodes == [16] * 4  # the first token comes from the prefill


def test_the_batch_shrinks_with_what_runs(tiny_qwen2):
    model, _ = run(tiny_qwen2, 4, [request(0, 1, 2), request(1, 1, 4), request(2, 1, 7)])
    assert model.decodes == [3, 2, 2, 1, 1, 1]


def test_a_prefill_is_bounded(tiny_qwen2, monkeypatch):
    monkeypatch.setattr("atoll.rollout.engines.local_decoder.PREFILL_TOKENS", 20)
    model, finished = run(tiny_qwen2, 8, [request(row, 1, 2, length=9) for row in range(5)])
    assert finished == 5
    assert model.prefills == [2, 2, 1]
    model, finished = run(tiny_qwen2, 8, [request(0, 1, 2, length=90)])
    assert (finished, model.prefills) == (1, [1])


def test_who_counts_what_waits_need_not_stop_the_queue(tiny_qwen2):
    """Another thread than the one that computes asks for it."""
    decoder: Decoder[str] = Decoder(CountingModel(tiny_qwen2), None, 3, 512, Version("", 0))
    decoder.submit([request(0, 2, 5), request(1, 3, 5)], "caller")

    class Meanwhile(list):
        def __len__(self) -> int:
            decoder.submit([request(2, 4, 5)], "caller")
            return super().__len__()

    decoder._waiting[0].tickets = Meanwhile(decoder._waiting[0].tickets)
    assert decoder.num_waiting == 5


def test_folders_that_hold_no_such_model(tiny_qwen2, tmp_path):
    from safetensors.torch import load_file, save_file

    layout = BufferLayout(read_spec(tiny_qwen2))
    with pytest.raises(UserError, match=r"holds no \*.safetensors"):
        layout.read(tmp_path, torch.float32)
    tensors = load_file(tiny_qwen2 / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for broken, message in (
        ({**tensors, name: tensors[name][1:].contiguous()}, r"up_proj.weight has shape \(127, 64\)"),
        ({**tensors, "model.layers.9.norm": torch.ones(2)}, "config.json implies no such tensor"),
        ({key: value for key, value in tensors.items() if key != name}, f"lack {name}"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            layout.read(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="not a readable safetensors"):
        layout.read(tmp_path, torch.float32)
