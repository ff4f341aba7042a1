"""A folder that is not a model is refused with what, got, expected, do this."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.config.schema import ParallelConfig
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import Experts, RopeScaling, check_layout, read_spec
from atoll.trainer.megatron.names import shapes
from atoll.trainer.megatron.tensor_files import open_tensors


@pytest.fixture
def folder(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def open_all(folder: Path) -> None:
    with ExitStack() as files:
        open_tensors(folder, read_spec(folder), files)


def test_reads_what_the_config_says(tiny_qwen3: Path) -> None:
    assert asdict(read_spec(tiny_qwen3)) == {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_positions": 4096,
        "head": "language",
        "tied": False,
        "qkv_bias": False,
        "qk_norm": True,
        "rope_scaling": None,
        "experts": None,
    }


def test_reads_the_experts(tiny_qwen3_moe: Path, tiny_qwen3_moe_plain: Path, tmp_path: Path) -> None:
    experts = Experts(num=4, per_token=2, intermediate_size=32, norm_topk_prob=True)
    assert read_spec(tiny_qwen3_moe).experts == experts
    assert read_spec(tiny_qwen3_moe_plain).experts == replace(experts, norm_topk_prob=False)
    published = Path(shutil.copytree(tiny_qwen3_moe, tmp_path / "model"))
    change_config(published, num_local_experts=None, num_experts=4)  # as written by transformers 4
    assert read_spec(published).experts == experts
    change_config(published, num_experts_per_tok=5)
    with pytest.raises(UserError, match="num_experts is 4, num_experts_per_tok 5"):
        read_spec(published)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama3", "tiny_qwen3"])
def test_frequencies_are_those_of_transformers(model: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(model)
    expected = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    spec = read_spec(folder)
    assert torch.equal(spec.rotary_frequencies(torch.arange(0, 16, 2, dtype=torch.float32)), expected)


def test_stretches_slow_turns_alone() -> None:
    """Of 64 positions: a pair that turns 4 times or more stays, one of 1 or less is 8 times slower, and of
    2.5 (half way) the mean: (1 + 1/8) / 2 = 0.5625."""
    turns = np.array([6.0, 4.0, 2.5, 1.0, 0.5])
    frequencies = 2 * np.pi * turns / 64
    stretched = RopeScaling(8.0, 1.0, 4.0, 64).apply(frequencies)
    np.testing.assert_allclose(stretched / frequencies, [1, 1, 0.5625, 0.125, 0.125])


def test_reads_the_rope_of_older_folders(folder: Path) -> None:
    change_config(folder, rope_parameters=None, rope_theta=1e6)
    assert read_spec(folder).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"architectures is \['MixtralForCausalLM'\], expected one of",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
        ({"rope_parameters": None}, "rope_theta is None"),
        ({"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], expected \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "'llama3' lacks factor"),
    ],
)
def test_refuses_what_it_cannot_build(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        read_spec(folder)


def test_reads_a_value_model_where_one_is_expected(folder: Path) -> None:
    value_model = {"architectures": ["Qwen3ForSequenceClassification"], "tie_word_embeddings": True}
    change_config(folder, **value_model, id2label={"0": "LABEL_0"})
    with pytest.raises(UserError, match=r"Classification'\], expected one of .*'Qwen3ForCausalLM'"):
        read_spec(folder)
    spec = read_spec(folder, ("language", "value"))
    assert (spec.head, spec.tied) == ("value", False)
    for labels in ({"0": "bad", "1": "good"}, {}):
        change_config(folder, id2label=labels)
        with pytest.raises(UserError, match=f"num_labels is {len(labels)}, expected 1"):
            read_spec(folder, ("value",))


def test_a_reward_model_is_no_policy(tiny_qwen3: Path) -> None:
    with pytest.raises(UserError, match=r"'Qwen3ForCausalLM'\], expected one of .*SequenceClassification"):
        read_spec(tiny_qwen3, ("value",))


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a model folder: no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_refuses_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "experts", "message"),
    [
        ({"tensor": 4}, None, r"critic\.parallel\.tensor = 4 does not divide .*num_key_value_heads = 2"),
        ({"pipeline": 4}, None, r"critic\.parallel\.pipeline = 4 does not divide .*num_hidden_layers = 2"),
        (
            {"pipeline": 2, "virtual_pipeline": 2},
            None,
            r"pipeline x virtual_pipeline = 4 does not divide .*num_hidden_layers = 2",
        ),
        ({"expert": 2, "data": 2}, None, r"critic\.parallel\.expert = 2: the model has no experts"),
        ({"expert": 4, "data": 4}, 6, r"critic\.parallel\.expert = 4 does not divide .*num_experts = 6"),
        ({"tensor": 2}, 4, r"set critic\.parallel\.sequence = true"),
    ],
)
def test_refuses_a_layout_that_does_not_divide_the_model(
    tiny_qwen3: Path, parallel: dict[str, int], experts: int | None, message: str
) -> None:
    spec = read_spec(tiny_qwen3)
    if experts is not None:
        spec = replace(spec, experts=Experts(experts, 2, 32, norm_topk_prob=True))
    with pytest.raises(UserError, match=message):
        check_layout(spec, ParallelConfig(**parallel), "critic")
    check_layout(read_spec(tiny_qwen3), ParallelConfig(tensor=2, pipeline=2, data=3), "critic")


def test_refuses_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights: model\.safetensors is missing"):
        open_all(folder)


def test_names_the_missing_file_of_an_index(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_all(folder)


@pytest.mark.parametrize("text", ["{", "{}"])
def test_refuses_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="no readable weight_map"):
        open_all(folder)


def test_refuses_a_file_that_was_cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match="not a safetensors file"):
        open_all(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"lacks tensor model\.norm\.weight"),
        ("model.extra", torch.zeros(2), r"has unknown tensor model\.extra"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight has shape \(63,\), expected \(64,\)"),
    ],
)
def test_names_the_tensor_that_does_not_match(
    folder: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        open_all(folder)


def test_refuses_fused_experts(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """As in transformers' memory, and in a dump of its state dict."""
    folder = Path(shutil.copytree(tiny_qwen3_moe, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 64, 64)}
    save_file(dense | fused, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"one tensor, model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        open_all(folder)


def test_a_tied_folder_may_repeat_the_embedding(tiny_qwen2_tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen2_tied, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(64, 64)}, folder / "model.safetensors")
    open_all(folder)
    assert "lm_head.weight" not in shapes(read_spec(folder))  # it is not read
