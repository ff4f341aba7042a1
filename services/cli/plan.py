"""`atoll plan --memory`: estimates the device memory of every rank before a run starts.

`--weights` is in plan_weights.py.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atoll.config.gpus import Gpu
from atoll.config.load import load
from atoll.config.placement import describe_placement
from atoll.config.resolve import resolve_for_gpus
from atoll.config.schema import Role, RoleSection, RolloutSection, RunConfig, TrainerSection, section_name
from atoll.rollout.engines.sglang.arguments import reserved_mib
from atoll.rollout.engines.sglang.parameters import num_elements
from atoll.runtime.errors import UserError
from atoll.runtime.memory import (
    BYTES,
    FRAMEWORK,
    RankMemory,
    host_memory,
    rank_memory,
    segment_bytes,
)
from atoll.runtime.model_spec import ModelSpec, read_spec, with_value_head

GIB = 1 << 30
EXIT_DOES_NOT_FIT = 1
COLUMNS = (
    "role",
    "stage",
    "ranks",
    "weights",
    "grads",
    "optim",
    "activ",
    "work",
    "frame",
    "frag",
    "total",
    "host",
)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The ranks of one pipeline stage of one role, which are identical."""

    role: Role
    stage: int
    num_ranks: int
    forward: RankMemory  # while models compute logprobs and values
    update: RankMemory  # while models are updated
    host: int  # bytes per rank
    offload: bool

    @property
    def peak(self) -> RankMemory:
        return max(self.forward, self.update, key=lambda memory: memory.total)

    def resting(self) -> int:
        """Bytes on the device while other models are updated."""
        return self.update.framework if self.offload else self.update.resident


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes on the GPU of one tensor-parallel rank of an SGLang replica."""

    weights: int
    pushes: int  # the staging buffer and communicators
    reserve: int  # what SGLang leaves free for activations and CUDA graphs
    keys_and_values: int  # the rest of the GPU

    @property
    def total(self) -> int:
        return self.weights + self.pushes + self.reserve + max(self.keys_and_values, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="a run's TOML file (model weights are not needed); with --weights, default: common models",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override one setting")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--memory", action="store_true", help="plan device memory")
    what.add_argument("--weights", action="store_true", help="estimate weight-push time by link")
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs of the machine; default: those in [placement.gpus], or enough for models that share them",
    )
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="memory of one device")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a device needs more than it has."""
    if arguments.weights:
        from atoll.cli.plan_weights import show

        show(planned_run(arguments) if arguments.config else None, arguments.json)
        return 0
    if arguments.config is None:
        raise UserError("atoll plan --memory needs a run's TOML file: name it")
    config = planned_run(arguments)
    rows, capacity = list(plan(config)), int(arguments.gpu_memory * GIB)
    replica = plan_replica(config, capacity)
    warnings = list(misfits(config, rows, replica, capacity))
    if arguments.json:
        tree = {
            "placement": config.placement.model_dump(),
            "ranks": [asdict(row) for row in rows],
            "replica": asdict(replica) if replica else None,
            "warnings": warnings,
        }
        print(json.dumps(tree, indent=2))
    else:
        _print(config, rows, replica, warnings)
    return EXIT_DOES_NOT_FIT if warnings else 0


def planned_run(arguments: argparse.Namespace) -> RunConfig:
    overrides = [*arguments.overrides, "placement.use_visible_gpus=false"]  # as if on one machine
    return resolve_for_gpus(load(arguments.config, overrides), arguments.gpus)


def plan(config: RunConfig) -> Iterator[StageMemory]:
    """Every role's stages. Raises UserError if a model folder has no config.json that Atoll can read."""
    for role, section in config.roles.items():
        spec = _spec(config, role)
        is_colocated = role == "reference" and config.reference.placement == "colocated"
        if is_colocated:  # uses the actor's ranks
            section = RoleSection.model_validate(
                {name: value for name, value in config.trainer if name in RoleSection.model_fields}
                | {"offload": section.offload}
            )
        parallel = section.parallel
        for stage in range(parallel.pipeline):
            forward, update = (rank_memory(spec, section, stage, phase) for phase in ("forward", "update"))
            if not isinstance(section, TrainerSection):
                update = replace(update, activations=0, working=0, fragmentation=0)  # idle
            if is_colocated:
                forward, update = replace(forward, framework=0), replace(update, framework=0)
            pushed = BYTES[config.rollout.dtype] if role == "actor" else 0
            if pushed and config.weights.transport == "cuda_ipc":  # its segment is on the GPU in either turn
                segment = segment_bytes(num_elements(spec, 1) * pushed, parallel.world_size)
                forward = replace(forward, framework=forward.framework + segment)
                update, pushed = replace(update, framework=update.framework + segment), 0
            host = host_memory(spec, section, stage, pushed)
            num_ranks = parallel.world_size // parallel.pipeline
            yield StageMemory(role, stage, num_ranks, forward, update, host, section.offload)


def plan_replica(config: RunConfig, capacity: int) -> ReplicaMemory | None:
    """Each rank of each replica; None: they are not on GPUs."""
    if not config.placement.gpus.replicas:
        return None
    spec, rollout = _spec(config, "actor"), config.rollout
    weights = num_elements(spec, rollout.tp_size) * BYTES[rollout.dtype]
    takes_turns = config.placement.mode == "colocated"
    pushed = config.weights
    pushes = reserved_mib(weights, pushed.transport, staging=pushed.staging, takes_turns=takes_turns) << 20
    share = (rollout.sglang.model_extra or {}).get("mem_fraction_static")
    reserve = int((1 - share) * capacity) if share else sglang_reserve(rollout.tp_size)
    return ReplicaMemory(weights, pushes, reserve, capacity - weights - pushes - reserve)


def sglang_reserve(tp_size: int) -> int:
    """As SGLang 0.5.23 reckons on an 80 GB H100 (handle_gpu_memory_settings): 1.5 MiB for each token of a
    prefill chunk, communication by rank, and its graphs."""
    return int(512 + 8192 * 1.5 + tp_size * 128 + 852) << 20


def sequence_bytes(spec: ModelSpec, rollout: RolloutSection, num_tokens: int) -> int:
    """Keys and values of a sequence on one rank of a replica."""
    heads = max(spec.num_kv_heads // rollout.tp_size, 1)
    return 2 * num_tokens * spec.num_layers * heads * spec.head_dim * BYTES[rollout.dtype]


def misfits(
    config: RunConfig, rows: Sequence[StageMemory], replica: ReplicaMemory | None, capacity: int
) -> Iterator[str]:
    """One sentence per kind of GPU that needs more than `capacity` bytes."""
    gpus = config.placement.gpus
    placed = defaultdict[Gpu, list[StageMemory]](list)
    for rank, row in _ranks(rows):
        if own := gpus.roles.get(row.role if row.role in config.started_roles else "actor"):
            placed[own[rank]].append(row)
    serving = [gpu for each in gpus.replicas for gpu in each]
    kinds = [(tuple(placed.get(gpu, ())), gpu in serving) for gpu in (*placed, *serving)]
    for held, serves in dict.fromkeys(kinds):
        names = " and ".join(f"{row.role} (stage {row.stage})" for row in held)
        asking = sum(row.forward.total for row in held)
        updating = sum(row.update.total if row.update.gradients else row.resting() for row in held)
        needed = max(asking, updating) + (FRAMEWORK if serves else 0)  # of a replica at rest
        if held and needed > capacity:
            phase = "asked" if asking > updating else "updated"
            yield (
                f"{names}: {needed / GIB:.1f} GiB while models are {phase}, more than the "
                f"device's {capacity / GIB:.1f}: {_advice(config, max(held, key=lambda row: row.peak.total))}"
            )
        if serves and replica:
            left = replica.keys_and_values - sum(row.resting() for row in held)
            tokens = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
            if left < sequence_bytes(_spec(config, "actor"), config.rollout, tokens):
                beside = f" beside {names}" if held else ""
                yield (
                    f"rollout{beside}: {left / GIB:.1f} GiB are left for keys and values, too little for one "
                    f"sequence of {tokens} tokens: raise rollout.sglang.tp_size"
                )


def _ranks(rows: Sequence[StageMemory]) -> Iterator[tuple[int, StageMemory]]:
    """Every rank with its row; ranks of a role are numbered from 0, stage by stage."""
    counts: Counter[str] = Counter()
    for row in rows:
        yield from ((counts[row.role] + i, row) for i in range(row.num_ranks))
        counts[row.role] += row.num_ranks


def _advice(config: RunConfig, row: StageMemory) -> str:
    """The setting that reduces the largest part most."""
    section, table = config.roles[row.role], section_name(row.role)
    memory = row.peak
    sizes = {
        name: size for name, size in asdict(memory).items() if name not in ("framework", "fragmentation")
    }
    largest = max(sizes, key=lambda name: sizes[name])
    more_ranks = f"raise {table}.parallel.tensor or pipeline"
    if largest == "optimizer" and isinstance(section, TrainerSection) and not section.optimizer.distributed:
        return f"set {table}.optimizer.distributed = true, with {table}.parallel.data above 1"
    if largest == "activations" and section.recompute != "full":
        return f'set {table}.recompute = "full", or lower {table}.max_tokens_per_microbatch'
    if largest in ("activations", "working"):
        name = "max_tokens_per_forward" if memory is row.forward else "max_tokens_per_microbatch"
        return f"lower {table}.{name}, or {more_ranks}"
    if section.dtype == "float32":
        return f'set {table}.dtype = "bfloat16", or {more_ranks}'
    return more_ranks


def _spec(config: RunConfig, role: Role) -> ModelSpec:
    spec = read_spec(config.model_folder(role), ("language", "value"))
    return with_value_head(spec) if role in ("critic", "cost_critic") else spec


def _print(
    config: RunConfig, rows: Sequence[StageMemory], replica: ReplicaMemory | None, warnings: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, title="GiB per rank", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        sizes = [*asdict(row.peak).values(), row.peak.total, row.host]
        cells = (f"{size / GIB:.2f}" for size in sizes)
        table.add_row(row.role, str(row.stage), str(row.num_ranks), *cells)
    console = Console()
    console.print(table)
    if replica:
        parts = {**asdict(replica), "total": replica.total}.items()
        shown = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in parts)
        console.print(f"each rank of a replica: {shown}", soft_wrap=True)
    if places := describe_placement(config):
        console.print(places, soft_wrap=True)
    for warning in warnings:
        console.print(f"does not fit: {warning}", soft_wrap=True)
