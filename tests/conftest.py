"""Small real models and a tokenizer, made locally once per session."""

import os
from pathlib import Path
from shutil import copytree

import pytest
from hypothesis import HealthCheck, settings

from tests.tokens import TOKEN

os.environ["ATOLL_TOKEN"] = TOKEN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--edits", type=int, default=2_000, help="edits of histories in tests/gateway")


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from a session with other tests than those of tests/gpu, and from the processes it starts: a
    process that has seen none sees none later."""
    folder = Path(__file__).with_name("gpu")
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(folder) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# The same cases in every run, so that a change is judged by itself; to look for others, take it out.
# Nothing is timed: a busy machine is no failure.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def write_tokenizer(folder: Path) -> None:
    """A character-level tokenizer over digits, `+`, `=` and letters: ids below 64."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "0123456789+-*/=()., #abcdefghijklmnopqrstuvwxyz"
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: 3 + i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", '
        '"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}'
    )


def write_model(folder: Path, family: str, **overrides: object) -> Path:
    """A random model of a `family` as transformers calls it, in Hugging Face's format, with tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if family in ("qwen3", "qwen3_moe"):
        settings["head_dim"] = 16
    if family == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | overrides)))
    # the default initialisation leaves biases at 0 and norms at 1: move them, so that a dropped one shows
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="session")
def tiny_qwen2_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2_tied"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def diverged_qwen2(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits are not finite."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("diverged") / "model"
    copytree(tiny_qwen2, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def tiny_llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 3.1's stretched positions: of a head's 8 pairs, some stay, some are between, some slow."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return write_model(
        tmp_path_factory.mktemp("llama3"), "llama", rope_parameters=rope, tie_word_embeddings=True
    )


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", norm_topk_prob=True)


@pytest.fixture(scope="session")
def tiny_qwen3_moe_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chosen experts' probabilities as they are: they do not sum to 1."""
    return write_model(tmp_path_factory.mktemp("qwen3_moe_plain"), "qwen3_moe", norm_topk_prob=False)
