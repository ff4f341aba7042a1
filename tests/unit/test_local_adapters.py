"""The local engine's unmerged adapters against the peft library."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atoll.config.schema import LoraConfig, LoraTarget
from atoll.rollout.engines import local_model
from atoll.rollout.engines.local_adapters import AdapterLayout
from atoll.rollout.engines.local_model import KVCache, LocalModel
from atoll.rollout.engines.local_weights import BufferLayout
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import LoraSpec

IDS = torch.arange(3, 43).view(2, 20)
ALL = LoraConfig().targets


@pytest.mark.parametrize("targets", [ALL, ("v_proj", "up_proj", "down_proj")])
@torch.no_grad()
def test_adapters_add_what_those_of_peft_add(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen2: Path, tmp_path: Path, targets: tuple[LoraTarget, ...]
) -> None:
    torch.manual_seed(0)
    config = PeftConfig(r=3, lora_alpha=5, target_modules=list(targets), init_lora_weights=False)
    theirs: PeftModel = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_qwen2), config)
    theirs.save_pretrained(tmp_path)
    logits = theirs(IDS).logits

    spec = read_spec(tiny_qwen2)
    base = BufferLayout(spec)
    weights = base.bind(base.read(tiny_qwen2, torch.float32))
    layout = AdapterLayout(base, weights, LoraSpec(rank=3, alpha=5, targets=targets))
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert set(layout.shard_layout.tensors) == adapter.keys()
    buffer = torch.cat([adapter[name].flatten() for name in layout.shard_layout.tensors])

    ours = LocalModel(spec, layout.bind(layout.zeros()), max_length=32)
    plain = LocalModel(spec, weights, max_length=32)
    prompts_PS, lengths_P = IDS[:, :19].contiguous(), torch.tensor([19, 19])
    assert torch.equal(*(model.prefill(prompts_PS, lengths_P).logits_PV for model in (ours, plain)))
    ours.weights = layout.bind(buffer)
    prefix = ours.prefill(prompts_PS, lengths_P)
    torch.testing.assert_close(prefix.logits_PV, logits[:, 18], rtol=0, atol=1e-5)
    cache = KVCache(spec, 2, torch.empty(0, 0, dtype=torch.uint8))
    cache.reserve(20)
    cache.fill(0, prefix, torch.arange(2))
    decoded = ours.decode(cache, IDS[:, 19], torch.full((2,), 19), longest=19)
    torch.testing.assert_close(decoded, logits[:, 19], rtol=0, atol=1e-5)
    monkeypatch.setattr(local_model, "SCORE_TOKENS", 7)  # 19 scores in three parts
    for ids, expected in zip(IDS, logits[:, :-1].log_softmax(-1), strict=True):
        scores = expected.gather(1, ids[1:, None]).squeeze(1)
        torch.testing.assert_close(ours.score(ids), scores, rtol=0, atol=1e-5)
