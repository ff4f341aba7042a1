"""Model folders without weights: real tokenizers (Qwen's ranks from dashscope, Llama 3's from llama-models)
or tiny byte-level ones, and the chat templates that TRL ships. Only the packages' files are read."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


@dataclass(frozen=True)
class Family:
    template: str  # file of TRL's folder chat_templates; "": no template
    special: Sequence[str]  # added tokens
    words: Sequence[str] = ()  # added tokens that are not marked special
    stops: Sequence[str] = ("<|im_end|>", "<|endoftext|>")
    ranks: str = "qwen"
    bos: str = ""
    rstrip: bool = False  # whether special tokens swallow the whitespace behind them


_QWEN = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
_QWEN_WORDS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
]
_QWEN3_WORDS = [*_QWEN_WORDS, "<tool_response>", "</tool_response>", "<think>", "</think>"]
_LLAMA = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>", "<|image|>"),
]
_GLM = [
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>"),
]
_GLM_WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
]
_HARMONY = [
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
    *("<|end|>", "<|message|>", "<|call|>"),
]
_PHI = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"]
_LLAMA_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family("qwen2_5", _QWEN, _QWEN_WORDS),
    "qwen3": Family("qwen3", _QWEN, _QWEN3_WORDS),
    "qwen3-instruct-2507": Family("qwen3_instruct_2507", _QWEN, _QWEN3_WORDS),
    "llama3.1": Family("llama3_1", _LLAMA, stops=_LLAMA_STOPS, ranks="llama", bos="<|begin_of_text|>"),
    "plain": Family("", ["<|endoftext|>"], stops=["<|endoftext|>"]),
    # Qwen's ranks stand in for those of the families below: their templates are what is tested
    "qwen3.5": Family("qwen3_5_think", _QWEN, _QWEN3_WORDS),
    "nemotron3": Family("nemotron_3_nano", _QWEN, _QWEN3_WORDS),
    "glm4.5": Family("glm4moe", _GLM, _GLM_WORDS, stops=("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gpt-oss": Family("gptoss", _HARMONY, stops=("<|return|>", "<|call|>"), bos="<|startoftext|>"),
    "gemma3": Family(
        "gemma3",
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"],
        stops=("<end_of_turn>", "<eos>"),
        bos="<bos>",
    ),
    "phi3": Family("phi3", _PHI, stops=("<|end|>", "<|endoftext|>"), rstrip=True),
}

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_folder(path: Path, family: str, *, tiny: bool = False) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and config.json (of a two-layer Qwen2 or Llama model).
    A tiny tokenizer has one token per byte, and the family's added tokens."""
    shape = FAMILIES[family]
    tokenizer = Tokenizer.from_str(_tokenizer("" if tiny else shape.ranks))
    added = [AddedToken(text, special=True, normalized=False, rstrip=shape.rstrip) for text in shape.special]
    if shape.ranks == "llama" and not tiny:
        reserved = (f"<|reserved_special_token_{number}|>" for number in range(2, 246))
        added += [AddedToken(text, special=True, normalized=False) for text in reserved]
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in shape.words])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": shape.stops[0]}
    if shape.bos:
        settings["bos_token"] = shape.bos
    if shape.template:
        settings["chat_template"] = (
            package_folder("trl") / f"chat_templates/{shape.template}.jinja"
        ).read_text()
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = [tokenizer.token_to_id(text) for text in shape.stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    name = "Llama" if shape.ranks == "llama" else "Qwen2"
    kind = {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]}
    (path / "config.json").write_text(
        json.dumps({"vocab_size": size, "eos_token_id": stops[0], **kind, **_MODEL})
    )
    return path


_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@cache
def _tokenizer(ranks_of: str) -> str:
    """tokenizer.json without added tokens, of "qwen", "llama" or "" (bytes)."""
    letters = _byte_letters()
    if not ranks_of:
        vocabulary, merges = {letters[byte]: byte for byte in range(256)}, []
    else:
        ranks = _read_ranks(_RANKS[ranks_of])
        spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
        vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
        pairs = [_last_merge(token, ranks) for token in ranks if len(token) > 1]
        # the two parts of a few of Llama's are no tokens: those are found as whole words only
        merges = [
            (spelled[left], spelled[right]) for left, right in pairs if left in ranks and right in ranks
        ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ranks_of == "llama"))
    if ranks_of != "llama":
        tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(_SPLIT.replace("DIGITS", "{1,3}" if ranks_of == "llama" else ""))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


_RANKS = {
    "qwen": ("dashscope", "resources/qwen.tiktoken"),
    "llama": ("llama_models", "llama3/tokenizer.model"),
}


def package_folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed: see tests/gateway/assets.txt")
    return Path(spec.origin).parent


def _read_ranks(place: tuple[str, str]) -> dict[bytes, int]:
    """Of each token, in ascending order."""
    lines = (package_folder(place[0]) / place[1]).read_bytes().split(b"\n")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that byte-pair encoding joins to get this one."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """The letters that byte-level tokenizers write bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
