"""Rules about [rollout]. See rules.py."""

from collections.abc import Callable

from atoll.config.mode_rules import is_changed
from atoll.config.schema import RunConfig

FLOAT32_BACKENDS = ("triton", "torch_native")  # of SGLang's attention


def _the_engine_reads_its_table(config: RunConfig) -> str | None:
    rollout = config.rollout
    table = rollout.local if rollout.engine == "sglang" else rollout.sglang
    if table == type(table)():
        return None
    name = "local" if rollout.engine == "sglang" else "sglang"
    return (
        f'[rollout.{name}] is read by rollout.engine = "{name}", but this run uses "{rollout.engine}": '
        "remove the table"
        ", or change the engine"
    )


def _prompts_leave_room_to_answer(config: RunConfig) -> str | None:
    """Prompt lengths are checked when rows are read, see RunConfig.longest_prompt."""
    new, prompt = config.rollout.sampling.max_new_tokens, config.data.max_prompt_tokens
    if config.sequence_limit is None or config.run.mode not in ("train", "rollout_only"):
        return None
    setting, limit = config.sequence_limit
    if is_changed(config, "data.max_prompt_tokens") and prompt + new > limit:
        return (
            f"data.max_prompt_tokens = {prompt} and rollout.sampling.max_new_tokens = {new} together exceed "
            f"{setting} = {limit}: lower one of them, or raise the limit"
        )
    return None


def _responses_fit_into_a_sequence(config: RunConfig) -> str | None:
    """A prompt has one token at least."""
    if config.sequence_limit is None or config.run.mode not in ("train", "rollout_only"):
        return None
    setting, limit = config.sequence_limit
    sets = {f"validation set {entry.name}: sampling": entry.sampling for entry in config.validation.sets}
    for where, sampling in ({"rollout.sampling": config.rollout.sampling} | sets).items():
        if sampling.max_new_tokens is not None and sampling.max_new_tokens >= limit:
            return (
                f"{where}.max_new_tokens = {sampling.max_new_tokens} is never reached: {setting} = {limit} "
                "holds prompt and response: lower it, or raise the limit"
            )
    return None


def _sglang_on_gpus_computes_in_bfloat16(config: RunConfig) -> str | None:
    """On Hopper, SGLang's attention is FlashAttention 3, which has no float32."""
    rollout = config.rollout
    backend = (rollout.sglang.model_extra or {}).get("attention_backend")
    if rollout.device == "cuda" and rollout.dtype == "float32" and backend not in FLOAT32_BACKENDS:
        return (
            'rollout.dtype = "float32", but SGLang\'s attention on GPUs computes in 16 bits: set it to '
            f'"bfloat16", or rollout.sglang.attention_backend to one of {", ".join(FLOAT32_BACKENDS)}'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _the_engine_reads_its_table,
    _prompts_leave_room_to_answer,
    _responses_fit_into_a_sequence,
    _sglang_on_gpus_computes_in_bfloat16,
)
