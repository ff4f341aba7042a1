"""Which of peft's folders a model cannot start from, and why; which layers have no adapters."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.config.schema import LoraConfig
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import Experts, ModelSpec, read_spec
from atoll.trainer.megatron.adapters.lora import check_targets
from atoll.trainer.megatron.adapters.peft import load_adapter, save_tensors
from atoll.trainer.megatron.model import MegatronModel

LORA = LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj"))
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, "r is 8, expected 4: set trainer.lora.rank to it"),
        ({"lora_alpha": 16}, "lora_alpha is 16, expected 8.0: set trainer.lora.alpha to it"),
        ({"target_modules": ["q_proj"]}, r"target_modules is \['q_proj'\], expected \['q_proj', 'v_proj'\]"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear', expected"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA': only plain LoRA is trained"),
        ({"use_dora": True}, "use_dora is True, expected False: only plain LoRA is trained"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ],
)
def test_an_adapter_that_is_not_the_runs_is_refused(
    tiny_qwen2: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(UserError, match=message):
        load_adapter(MegatronModel((), read_spec(tiny_qwen2), tiny_qwen2, LORA), tmp_path)


def test_an_adapter_of_another_model_is_refused(tiny_qwen2: Path, tmp_path: Path) -> None:
    model = MegatronModel((), read_spec(tiny_qwen2), tiny_qwen2, LORA)
    with pytest.raises(UserError, match=r"holds no adapter of peft: adapter_config\.json cannot be read"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match=r"adapter_model\.safetensors cannot be read"):
        load_adapter(model, tmp_path)
    # tiny_qwen2: hidden size 64, 4 heads and 2 key-value heads of 16, 2 layers
    shapes = {"q_proj.lora_A": (4, 64), "q_proj.lora_B": (64, 4), "v_proj.lora_A": (4, 64)}
    tensors = {f"{LAYER}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors[f"{LAYER}.v_proj.lora_B.weight"] = torch.zeros(64, 4)  # of 4 key-value heads
    tensors |= {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"v_proj\.lora_B\.weight has shape \(64, 4\), expected \(32, 4\)"):
        load_adapter(model, tmp_path)


def test_experts_have_no_adapters(tiny_qwen3: Path) -> None:
    dense: ModelSpec = read_spec(tiny_qwen3)
    sparse = replace(dense, experts=Experts(4, 2, 32, norm_topk_prob=True))
    check_targets(dense, LoraConfig())
    check_targets(sparse, LORA)
    with pytest.raises(
        UserError, match=r"targets has gate_proj, up_proj, down_proj, which are in this model"
    ):
        check_targets(sparse, LoraConfig())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_weights_are_as_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.ones(2)}, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert torch.equal(load_file(path)["a"], torch.ones(2))
