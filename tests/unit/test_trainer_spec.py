"""A folder that is no model is refused with what, got, expected, do this."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.runtime.errors import UserError
from services.runtime.model_spec import check_tensor_parallel, read_spec
from services.trainer.hf import open_tensors
from services.trainer.names import shapes


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
        "max_positions": 512,
        "head": "language",
        "tied": False,
        "qkv_bias": False,
        "qk_norm": True,
    }


def test_reads_the_rope_of_older_folders(folder: Path) -> None:
    change_config(folder, rope_parameters=None, rope_theta=1e6)
    assert read_spec(folder).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures is \['LlamaForCausalLM'\], expected one of",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
        ({"rope_parameters": None}, "rope_theta is None"),
        ({"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"attention_bias": True}, "attention_bias is True"),
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
    with pytest.raises(UserError, match=r"is no model folder: no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_refuses_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_spec(tmp_path)


def test_refuses_a_tensor_size_that_does_not_divide(tiny_qwen3: Path) -> None:
    with pytest.raises(
        UserError, match=r"critic\.parallel\.tensor = 4 does not divide .*num_key_value_heads = 2"
    ):
        check_tensor_parallel(read_spec(tiny_qwen3), 4, "critic")


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


def test_a_tied_folder_may_repeat_the_embedding(tiny_qwen2_tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen2_tied, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(64, 64)}, folder / "model.safetensors")
    open_all(folder)
    assert "lm_head.weight" not in shapes(read_spec(folder))  # it is not read
