"""What SGLang makes of the engine's arguments on an H100: its own ServerArgs, resolved as on one. No GPU is
needed, and what really fits was not measured."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups import memory_hook, resolution_hooks
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import third_party_cache_defaults
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
from transformers import Qwen2Config, Qwen3MoeConfig

from atoll.cli.plan_weights import CASES, PushCase, estimate_push
from atoll.config.schema import ParallelConfig, SGLangConfig
from atoll.rollout.engines.sglang import launch
from atoll.rollout.engines.sglang.arguments import arguments_of, reserved_mib
from atoll.rollout.engines.sglang.engine import SGLangEngine
from atoll.rollout.engines.sglang.parameters import num_elements
from atoll.rollout.engines.sglang.server import SGLangServer
from atoll.runtime.errors import EngineDiedError
from atoll.runtime.model_spec import ModelSpec
from atoll.wire.types import ReceiverSetup, Version

H100_MIB = 81559
HOPPER = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "device_sm": 90,
    "device_capability": (9, 0),
}


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (memory_hook, launch):
        monkeypatch.setattr(module, "get_device_memory_capacity", lambda device: H100_MIB)
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    with override_platform(**HOPPER):
        yield


def save(spec: ModelSpec, folder: Path) -> None:
    """The configuration alone; arguments are resolved without weights."""
    settings: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
    }
    if spec.experts is None:
        Qwen2Config(**settings, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    else:
        Qwen3MoeConfig(
            **settings,
            architectures=["Qwen3MoeForCausalLM"],
            head_dim=spec.head_dim,
            num_experts=spec.experts.num,
            num_experts_per_tok=spec.experts.per_token,
            moe_intermediate_size=spec.experts.intermediate_size,
        ).save_pretrained(folder)


def resolve(folder: Path, dtype: str, tp_size: int = 1, **user: object) -> Any:
    arguments = prepare_server_args(
        arguments_of(user, {"model_path": folder, "dtype": dtype}, "cuda", tp_size)
    )
    arguments.resolve_once()
    return resolved_view(arguments)


def case_of(model: str, tp_size: int) -> PushCase:
    return next(case for case in CASES if (case.model, case.tp_size) == (model, tp_size))


def test_sglang_picks_an_attention_without_float32(tmp_path: Path) -> None:
    """Why rollout.dtype = "float32" is refused: SGLang itself picks FlashAttention 3 and says nothing."""
    save(case_of("7B", 1).spec, tmp_path)
    for dtype in ("bfloat16", "float32"):
        settings = resolve(tmp_path, dtype)
        assert (settings.attention_backend, settings.dtype) == ("fa3", dtype)
        assert settings.disable_overlap_schedule
        own = 512 + 8192 * 1.5 + 128 + 256 * 2  # MiB: constant, tokens of a prefill, a rank, CUDA graphs
        assert settings.mem_fraction_static == round(1 - own / H100_MIB, 3) == 0.835


def test_a_user_may_choose_memory_and_attention(tmp_path: Path) -> None:
    save(case_of("7B", 1).spec, tmp_path)
    launch.reserve(10_000)
    settings = resolve(tmp_path, "float32", attention_backend="triton", mem_fraction_static=0.5)
    assert (settings.attention_backend, settings.mem_fraction_static) == ("triton", 0.5)


@pytest.mark.parametrize(("model", "tp_size"), [("7B", 1), ("32B", 4), ("30B-A3B", 4)])
def test_a_shard_is_staged_beside_what_sglang_needs(tmp_path: Path, model: str, tp_size: int) -> None:
    """In the memory that SGLang leaves free there is room for what the plan sends to a rank, and for its
    communicators, beside what SGLang leaves for itself; without Atoll there was none."""
    case = case_of(model, tp_size)
    save(case.spec, tmp_path)
    alone = resolve(tmp_path, "bfloat16", tp_size).mem_fraction_static
    shard_mib = num_elements(case.spec, tp_size) * 2 / (1 << 20)
    received = estimate_push(replace(case, trainer=ParallelConfig())).received / (1 << 20)
    assert received == pytest.approx(shard_mib, rel=0.01)
    assert received > (1 - alone) * H100_MIB

    reserved = reserved_mib(int(shard_mib * (1 << 20)), "nccl", staging="device", takes_turns=False)
    launch.reserve(reserved)
    left = resolve(tmp_path, "bfloat16", tp_size).mem_fraction_static
    assert (alone - left) * H100_MIB == pytest.approx(received + 2 * 300, rel=0.01)
    assert left * H100_MIB > 2 * shard_mib  # weights, and as much for keys and values


@pytest.mark.parametrize(
    ("staging", "staged_bytes"),
    [("device", 7_615_616_512 * 2), ("host", 0)],  # the model card's parameters
)
async def test_the_engine_starts_its_server_with_room_for_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: str, staged_bytes: int
) -> None:
    started: dict[str, Any] = {}

    async def start(arguments: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        started.update(options)
        raise EngineDiedError("enough")

    monkeypatch.setattr(SGLangServer, "start", start)
    save(case_of("7B", 1).spec, tmp_path)
    with pytest.raises(EngineDiedError, match="enough"):
        await SGLangEngine.start(
            tmp_path,
            device="cuda",
            dtype="bfloat16",
            threads=1,
            config=SGLangConfig(),
            start_timeout_s=9.0,
            version=Version("a3f0", 0),
            setup=ReceiverSetup("nccl", deadline_s=60.0, staging=staging),
        )
    assert started["reserved_mib"] == -(-staged_bytes // (1 << 20)) + 2 * 300
    # a broadcast that waits for a slow peer ends before the server would be killed for its silence
    assert started["control_timeout_s"] == 180


def test_compiled_kernels_outlive_a_server() -> None:
    """A server's TMPDIR, where Inductor would keep them, ends with it."""
    for folder in third_party_cache_defaults().values():
        assert not Path(folder).is_relative_to(tempfile.gettempdir())
