"""Command line and environment of an SGLang server. Pure."""

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from atoll.config.transports import TRANSPORTS
from atoll.runtime.errors import UserError

# Buffers of an NCCL communicator on each GPU, outside of torch's memory. An estimate, not measured.
COMMUNICATOR_MIB: Final = 300
# Arguments set by the engine, and why.
RESERVED: Final = {
    "model_path": "it is model.path",
    "device": "it is rollout.device",
    "dtype": "it is rollout.dtype",
    "base_gpu_id": "its GPUs are those of [placement]",
    "host": "the server listens only on loopback",
    "port": "the service chooses a free port",
    "weight_version": "versions come from the trainer",
    "dp_size": "weights are pushed to replicas of one server each: set rollout.replicas instead",
    "pp_size": "weights are pushed to tensor-parallel ranks only: set tp_size instead",
    "custom_weight_loader": "weights arrive through Atoll's receiver",
    "disable_overlap_schedule": "with overlap, one token of each sequence is in flight while weights change, "
    "and SGLang counts it as one of the new version",
    "enable_return_routed_experts": "it is trainer.router_replay",
    "skip_tokenizer_init": "stop strings and texts need the tokenizer",
    "skip_server_warmup": "the service is ready once a first request was answered",
}


def arguments_of(
    user: Mapping[str, object],
    ours: Mapping[str, object],
    device: str,
    tp_size: int,
    *,
    takes_turns: bool = False,
) -> list[str]:
    """SGLang's command line. `user` is what [rollout.sglang] has beside tp_size, `ours` what the
    engine adds: underscores become dashes, true is the bare flag, false leaves it out. `takes_turns`: with
    the trainer, on the same GPUs. Raises UserError for a key that is the engine's."""
    if taken := sorted(user.keys() & RESERVED.keys()):
        raise UserError(f"rollout.sglang.{taken[0]} cannot be set: {RESERVED[taken[0]]}; remove it")
    # of samples that share a prompt, one computes it; a line in the log for each sample would be too many
    defaults: dict[str, Any] = {"schedule_policy": "lpm", "log_level_http": "warning"}
    if device == "cpu":
        # without them, SGLang takes most of the memory for keys and values, and a core while it is idle
        defaults |= {"max_total_tokens": 16384, "sleep_on_idle": True, "grammar_backend": "none"}
    fixed = {"device": device, "tp_size": tp_size, "host": "127.0.0.1", "disable_overlap_schedule": True}
    if takes_turns and device == "cuda":
        fixed["enable_memory_saver"] = True  # or SGLang could not release its memory
    arguments = []
    for name, value in {**defaults, **user, **fixed, **ours}.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case True:
                arguments.append(flag)
            case False | None:
                pass
            case list() | tuple():
                arguments += [flag, *map(str, value)]
            case dict():
                arguments += [flag, json.dumps(value)]
            case _:
                arguments += [flag, str(value)]
    return arguments


def reserved_mib(
    shard_bytes: int, transport: str, *, staging: str, takes_turns: bool, segment_bytes: int = 0
) -> int:
    """GPU memory per rank, in MiB, that weight pushes need beside SGLang's own: the staging buffer of
    `shard_bytes`, and the communicators of the transport. `takes_turns`: with the trainer, on the same GPUs;
    weights then go straight into the parameters, with `cuda_ipc` from `segment_bytes` of a trainer's rank."""
    staged = shard_bytes if staging == "device" else 0
    if takes_turns:
        staged = segment_bytes if transport == "cuda_ipc" else 0
    traits = TRANSPORTS[transport]
    communicators = traits.max_senders if traits.on_gpus and not traits.stays_readable else 0
    return -(-staged // (1 << 20)) + communicators * COMMUNICATOR_MIB


def environment_of(device: str, tp_size: int, threads: int, *, takes_turns: bool = False) -> dict[str, str]:
    """Of the child, beside this process's own. `takes_turns`: with the trainer, on the same GPUs."""
    variables = {"HF_HUB_OFFLINE": "1"}
    if takes_turns:  # the memory saver cannot release expandable segments, which a user may have set
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    if device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads)}
        if tp_size > 1:  # SGLang wants to be told the cores of each rank
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[rank % len(cores)]) for rank in range(tp_size)]
            variables |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(bound), "TORCHDYNAMO_DISABLE": "1"}
    return variables
