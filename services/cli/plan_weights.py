"""`atoll plan --weights`: estimates the time of a weight push from the plan that a run would use."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from atoll.config.schema import ParallelConfig, RunConfig, WeightsSection
from atoll.config.transports import TRANSPORTS
from atoll.rollout.engines.sglang.parameters import parameters
from atoll.runtime.memory import BYTES
from atoll.runtime.model_spec import Experts, ModelSpec, check_layout, read_spec
from atoll.trainer.megatron.names import Chunk, tensor_slices
from atoll.weights.estimate import estimate
from atoll.weights.plan import MAX_SENDERS, plan
from atoll.weights.tensor_slices import TensorSlice, shard_layout_of
from atoll.wire.types import ShardLayout

ROUND_S = 1e-3  # latency of the calls to trainer and replica, measured on one host
REACHED = 0.8  # share of a link's nominal speed, with messages of some MiB
# bytes/s between a trainer rank and a replica's rank, each with its own link
LINKS = {
    "shm": 2.2e9,  # of a full push with one core per side, measured (docs/benchmarks.md)
    "100G": 12.5e9 * REACHED,  # network, Gb/s
    "400G": 50e9 * REACHED,
    "PCIe5": 63e9 * REACHED,
    "NVLink": 450e9 * REACHED,  # of an H100
}


@dataclass(frozen=True, slots=True)
class PushCase:
    """A trainer's layout and the replica class that it pushes to; the number of replicas does not matter."""

    model: str
    spec: ModelSpec
    trainer: ParallelConfig
    tp_size: int  # of a replica
    dtype: str = "bfloat16"  # that is served
    bucket_mb: int = WeightsSection().bucket_mb
    max_senders: int = MAX_SENDERS


@dataclass(frozen=True, slots=True)
class PushEstimateRow:
    model: str
    trainer: str  # its layout, as in TP2 PP4
    trainer_ranks: int
    tp_size: int
    sent: int  # bytes from the busiest trainer rank
    received: int  # bytes to the busiest replica rank: its part of the model
    rounds: int
    seconds: Mapping[str, float]  # by link


def _dense(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> ModelSpec:
    """A Qwen2.5."""
    return ModelSpec(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=32768,
        head="language",
        tied=tied,
        qkv_bias=True,
        qk_norm=False,
    )


def _mixture(layers: int, hidden: int, ffn: int, heads: int) -> ModelSpec:
    """A Qwen3 of 128 experts, 8 for a token."""
    dense = _dense(layers, hidden, 3 * hidden, heads, 4, 151936, tied=False)
    experts = Experts(num=128, per_token=8, intermediate_size=ffn, norm_topk_prob=True)
    return replace(dense, qkv_bias=False, qk_norm=True, experts=experts)


def _layout(**axes: int) -> ParallelConfig:
    return ParallelConfig(sequence=axes.get("tensor", 1) > 1, **axes)


CASES = (  # planned if no config is given; each fits GPUs with 80 GB
    PushCase("1.5B", _dense(28, 1536, 8960, 12, 2, 151936, tied=True), _layout(data=8), 1),
    PushCase("7B", _dense(28, 3584, 18944, 28, 4, 152064, tied=False), _layout(tensor=2, data=4), 1),
    PushCase("7B", _dense(28, 3584, 18944, 28, 4, 152064, tied=False), _layout(tensor=2, data=32), 4),
    PushCase("32B", _dense(64, 5120, 27648, 40, 8, 152064, tied=False), _layout(tensor=8, data=8), 4),
    PushCase("30B-A3B", _mixture(48, 2048, 768, 32), _layout(tensor=2, expert=8, data=32), 4),
    PushCase("235B-A22B", _mixture(94, 4096, 1536, 64), _layout(tensor=4, pipeline=2, expert=32, data=32), 8),
)


def links_of(config: RunConfig) -> tuple[str, ...]:
    """Names of the links that a run's pushes may take by its placement."""
    actor, replicas = config.placement.gpus.roles.get("actor", ()), config.placement.gpus.replicas
    hosts = {gpu.host for each in (actor, *replicas) for gpu in each}
    if len(hosts) > 1:
        return "100G", "400G"
    return ("PCIe5", "NVLink") if TRANSPORTS[config.weights.transport].on_gpus else ("shm",)


def show(config: RunConfig | None, as_json: bool) -> None:
    """Prints the estimate for this run, with its links marked, or for common models."""
    from rich.console import Console
    from rich.table import Table

    rows = [estimate_push(case) for case in ([case_of(config)] if config else CASES)]
    own = links_of(config) if config else ()
    if as_json:
        print(json.dumps([{**asdict(row), "links": own} for row in rows], indent=2))
        return
    links = (f"{link}*" if link in own else link for link in LINKS)
    titles = ("model", "ranks", "layout", "to", "sent", "got", "rounds", *links)
    title = "GB sent and received by the busiest rank; seconds per push by link"
    if config:
        title += f" (*: of this run, {config.weights.transport}, {config.placement.mode})"
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in titles:  # on a narrow terminal words are broken, and no number is cut
        table.add_column(name, overflow="fold", no_wrap=name not in ("model", "layout"))
    for found in rows:
        table.add_row(*format_row(found))
    Console().print(table)


def format_row(row: PushEstimateRow) -> list[str]:
    return [
        row.model,
        str(row.trainer_ranks),
        row.trainer,
        f"TP{row.tp_size}",
        f"{row.sent / 1e9:.3g}",
        f"{row.received / 1e9:.3g}",
        f"{row.rounds:,}",
        *(f"{seconds:.2g}" for seconds in row.seconds.values()),
    ]


def case_of(config: RunConfig) -> PushCase:
    """The case of a run. Raises UserError if Atoll cannot use the model folder or the layout."""
    spec = read_spec(config.model.path)
    check_layout(spec, config.trainer.parallel, "trainer")
    return PushCase(
        model=config.model.path.name,
        spec=spec,
        trainer=config.trainer.parallel,
        tp_size=config.rollout.tp_size,
        dtype=config.rollout.dtype,
        bucket_mb=config.weights.bucket_mb,
        max_senders=config.weights.max_senders,
    )


def estimate_push(case: PushCase) -> PushEstimateRow:
    """Plans the push and estimates its rounds on each kind of link."""
    sources, targets = (
        trainer_shard_layouts(case.spec, case.trainer),
        replica_shard_layouts(case.spec, case.tp_size),
    )
    part_elements = (case.bucket_mb << 20) // BYTES[case.dtype]
    pushed = plan(sources, targets, part_elements=part_elements, max_senders=case.max_senders)
    at_1 = estimate(pushed, BYTES[case.dtype], bytes_per_s=1)
    axes = {"TP": case.trainer.tensor, "PP": case.trainer.pipeline, "CP": case.trainer.context}
    axes |= {"EP": case.trainer.expert, "DP": case.trainer.data}
    return PushEstimateRow(
        model=case.model,
        trainer=" ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "1 rank",
        trainer_ranks=case.trainer.world_size,
        tp_size=case.tp_size,
        sent=int(at_1.source_bytes.max()),
        received=int(at_1.target_bytes.max()),
        rounds=at_1.rounds,
        seconds={link: at_1.seconds / speed + at_1.rounds * ROUND_S for link, speed in LINKS.items()},
    )


def trainer_shard_layouts(spec: ModelSpec, parallel: ParallelConfig) -> list[ShardLayout]:
    """What each rank will hold, as services/trainer/megatron/shards.py reads from the built model.

    Megatron numbers ranks tensor first, pipeline last, and experts over all ranks of a stage.
    """
    shard_layouts: dict[tuple[int, int, int], ShardLayout] = {}
    shares = []
    for rank in range(parallel.world_size):
        stage, within = divmod(rank, parallel.world_size // parallel.pipeline)
        share = (stage, within % parallel.tensor, within % parallel.expert)
        if share not in shard_layouts:
            shard_layouts[share] = shard_layout_of(_rank_slices(spec, parallel, *share))
        shares.append(share)
    return [shard_layouts[share] for share in shares]


def replica_shard_layouts(spec: ModelSpec, tp_size: int) -> list[ShardLayout]:
    """What each tensor-parallel rank of an SGLang replica will hold; with tp_size 1, also a local engine."""
    ranks = []
    for rank in range(tp_size):
        held = {name: parameter.pieces for name, parameter in parameters(spec, rank, tp_size).items()}
        if spec.tied:
            del held["lm_head.weight"]
        ranks.append(shard_layout_of(held.values()))
    return ranks


def _rank_slices(
    spec: ModelSpec, parallel: ParallelConfig, stage: int, tensor: int, expert: int
) -> Iterator[list[TensorSlice]]:
    """The slices of each parameter of a rank, from its position along three axes."""
    num_chunks = parallel.pipeline * parallel.virtual_pipeline
    num_layers = spec.num_layers // num_chunks
    num_experts = spec.experts.num // parallel.expert if spec.experts else 0
    for number in range(stage, num_chunks, parallel.pipeline):
        chunk = Chunk(
            range(number * num_layers, (number + 1) * num_layers),
            is_first=number == 0,
            is_last=number == num_chunks - 1,
            rank=tensor,
            size=parallel.tensor,
            experts=range(expert * num_experts, (expert + 1) * num_experts),
        )
        yield from tensor_slices(spec, chunk).values()
