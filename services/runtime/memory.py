"""Estimates a model's memory on each of its ranks, from its config.json and settings. Pure arithmetic.

In the style of Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for our own layers: each term names the
tensors that it counts. tests/integration/test_memory_plan.py compares them with what is really allocated.

Unknown before a run, and ignored: keys of a shared prompt are gathered once for each of its samples,
short segments are padded, experts get unequal shares, a tree above the budget is a micro-batch of its own.
"""

from dataclasses import dataclass
from typing import Literal

from atoll.config.schema import LoraConfig, ParallelConfig, RoleSection, TrainerSection
from atoll.runtime.model_spec import ModelSpec

Phase = Literal["forward", "update"]

FP32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
CHUNK_LOGITS = 1 << 28  # of services/trainer/losses/logprobs.py, on GPUs
LOGITS_AT_ONCE = 2  # float32 copies of a chunk: logits, and their exponentials or a factor of their gradient
# Usual figures, not computed
FRAMEWORK = 1 << 30  # a process's CUDA context and library workspaces
COMMUNICATOR = 512 << 20  # NCCL's buffers for one of Megatron's groups of ranks
FRAGMENTATION = 0.1  # of memory that comes and goes: micro-batches differ in shape


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes on the device of one rank."""

    parameters: int
    gradients: int  # sums in float32, and the gradient of one matrix on its way there
    optimizer: int  # moments, and float32 copies of bfloat16 weights
    activations: int  # kept from forward passes for their backward passes
    working: int  # what one operation needs beside: a chunk of logits, or a layer's backward pass
    framework: int  # CUDA and NCCL
    fragmentation: int = 0

    @property
    def total(self) -> int:
        return self.resident + self.activations + self.working + self.fragmentation

    @property
    def resident(self) -> int:
        """Bytes that are resident all the time, unless offloaded."""
        return self.parameters + self.gradients + self.optimizer + self.framework


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one rank, without and in experts: the two are split over different ranks."""

    dense: int
    experts: int
    largest: int = 0  # matrix

    @property
    def total(self) -> int:
        return self.dense + self.experts


def rank_memory(spec: ModelSpec, section: RoleSection, stage: int, phase: Phase) -> RankMemory:
    """Of a rank in pipeline stage `stage`; ranks of a stage are identical.

    "forward" is a pass that keeps nothing, over max_tokens_per_forward tokens; "update" one micro-batch of
    max_tokens_per_microbatch after the other, forward and backward.
    """
    parallel, size = section.parallel, BYTES[section.dtype]
    held, trained = parameters(spec, parallel, stage), ParameterCount(0, 0)
    optimizer = 0
    if isinstance(section, TrainerSection):
        trained = adapters(spec, section.lora, parallel) if section.lora else held
        # exp_avg and exp_avg_sq, and the float32 weights that bfloat16 ones are rounded from
        each = 2 * FP32 + (FP32 if size < FP32 else 0)
        optimizer = _share(trained, parallel, section.optimizer.distributed) * each
    is_update = phase == "update" and trained.total > 0
    activations = _activations(spec, section, stage) if is_update else 0
    working = _working(spec, section, stage, is_update)
    return RankMemory(
        parameters=held.total * size,
        gradients=trained.total * FP32 + trained.largest * size,
        optimizer=optimizer,
        activations=activations,
        working=working,
        framework=FRAMEWORK + COMMUNICATOR * _num_communicators(parallel),
        fragmentation=int(FRAGMENTATION * (activations + working)),
    )


def parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> ParameterCount:
    """Of a rank in pipeline stage `stage`."""
    hidden, tp, layers = spec.hidden_size, parallel.tensor, spec.num_layers // parallel.pipeline
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, projection = (query + 2 * key) * hidden // tp, query * hidden // tp
    dense = qkv + projection + 2 * hidden  # and two norms
    dense += (query + 2 * key) // tp if spec.qkv_bias else 0
    dense += 2 * spec.head_dim if spec.qk_norm else 0
    experts, largest = 0, max(qkv, projection)
    if spec.experts is None:
        dense += 3 * hidden * spec.intermediate_size // tp  # gate, up, down
        largest = max(largest, 2 * hidden * spec.intermediate_size // tp)
    else:  # each is whole on its rank
        dense += spec.experts.num * hidden  # router
        experts = spec.experts.num // parallel.expert * 3 * hidden * spec.experts.intermediate_size
        largest = max(largest, 2 * experts // 3)  # gate and up of all
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    vocabulary = spec.vocab_size * hidden // tp
    ends = vocabulary if is_first else 0
    if is_last:
        ends += hidden  # norm
        ends += hidden if spec.head == "value" else 0 if spec.tied and is_first else vocabulary
    if is_first or (is_last and spec.head == "language"):
        largest = max(largest, vocabulary)
    return ParameterCount(dense * layers + ends, experts * layers, largest)


def adapters(spec: ModelSpec, lora: LoraConfig, parallel: ParallelConfig) -> ParameterCount:
    """A [rank, inputs] and B [outputs, rank] of each target, one of both split over tensor-parallel ranks."""
    hidden, tp, ffn = spec.hidden_size, parallel.tensor, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    extents = {  # A's inputs and B's outputs on this rank
        "q_proj": hidden + query // tp,
        "k_proj": hidden + key // tp,
        "v_proj": hidden + key // tp,
        "o_proj": query // tp + hidden,
        "gate_proj": hidden + ffn // tp,
        "up_proj": hidden + ffn // tp,
        "down_proj": ffn // tp + hidden,
    }
    layers = spec.num_layers // parallel.pipeline
    return ParameterCount(layers * lora.rank * sum(extents[target] for target in lora.targets), 0)


def segment_bytes(model_bytes: int, num_ranks: int) -> int:
    """Of a trainer rank: both halves of what replicas read (`shm`, `cuda_ipc`). Ranks send equal parts."""
    return 2 * model_bytes // num_ranks


def host_memory(spec: ModelSpec, section: RoleSection, stage: int, push_bytes: int) -> int:
    """Bytes of host memory per rank: both halves of the segment that weights are pushed through, in
    `push_bytes` per element (0: it pushes none), and what is off-loaded, activations among it."""
    pushed = 2 * push_bytes * parameters(spec, section.parallel, stage).total
    memory = rank_memory(spec, section, stage, "forward")
    activations = 0
    if section.recompute == "offload":
        on_device = section.model_copy(update={"recompute": "none"})
        activations = _activations(spec, on_device, stage) - _activations(spec, section, stage)
    return pushed + activations + (memory.parameters + memory.optimizer if section.offload else 0)


def _num_communicators(parallel: ParallelConfig) -> int:
    """Groups of more than one rank that a rank belongs to, as Megatron forms them."""
    tensor, copies, expert = parallel.tensor, parallel.context * parallel.data, parallel.expert
    model = tensor * parallel.pipeline
    stage = tensor * copies  # whose ranks share its experts
    copies_of_experts = stage // expert if expert > 1 else 1
    groups = (parallel.world_size, model, tensor, parallel.pipeline, parallel.context, copies, expert)
    return sum(size > 1 for size in (*groups, copies_of_experts))


def _share(count: ParameterCount, parallel: ParallelConfig, distributed: bool) -> int:
    """The parameters whose optimizer state a rank holds."""
    if not distributed:
        return count.total
    copies = parallel.data * parallel.context
    return count.dense // copies + count.experts * parallel.expert // (copies * parallel.tensor)


def _activations(spec: ModelSpec, section: RoleSection, stage: int) -> int:
    """Bytes that backward passes read, of all micro-batches on their way through the stages."""
    parallel, size = section.parallel, BYTES[section.dtype]
    tokens = section.max_tokens_per_microbatch // parallel.context
    layers = spec.num_layers // (parallel.pipeline * parallel.virtual_pipeline)  # of one virtual stage
    in_flight = parallel.pipeline - stage  # 1F1B: a stage is as many ahead as there are stages behind it
    if parallel.virtual_pipeline > 1:  # interleaved schedule (arXiv:2104.04473, section 2.2)
        in_flight = 2 * (parallel.pipeline - stage - 1)
        in_flight += (parallel.virtual_pipeline - 1) * parallel.pipeline + 1
    each = layers * _activations_by_layer(spec, section, section.recompute)
    each += 2 * spec.head_dim * size  # cosines and sines of the rotation
    kept = tokens * each * in_flight
    if stage == parallel.pipeline - 1:  # the final norm's input, its output and that gathered; rows
        sp = parallel.tensor if parallel.sequence else 1
        widths = 2 / sp + (1 if sp > 1 else 0) + 1
        kept += int(tokens * widths * spec.hidden_size * size)
    return kept


def _activations_by_layer(spec: ModelSpec, section: RoleSection, recompute: str) -> int:
    """Bytes of a token."""
    parallel, size = section.parallel, BYTES[section.dtype]
    tp, sp = parallel.tensor, parallel.tensor if parallel.sequence else 1
    hidden = spec.hidden_size / sp
    if recompute == "offload":
        return 0
    if recompute == "full":
        return int(hidden * size)  # the layer's input
    heads, kv_heads = spec.num_heads / tp, spec.num_kv_heads / tp
    query, key = heads * spec.head_dim, kv_heads * spec.head_dim
    mixed = query + 2 * key  # the output of linear_qkv, heads of a group beside their key and value
    in_order = query if kv_heads > 1 else 0  # its queries once more, of all groups
    elements = 4 * hidden  # both norms' inputs and outputs
    float32 = 2 / sp  # and scales
    if spec.qk_norm:
        float32 += heads + kv_heads
    if recompute == "selective":  # queries, keys and values before rotation; the output
        elements += mixed + in_order + query
        elements += query + key if spec.qk_norm else 0  # after their norm
    else:  # rotated and gathered queries, keys and values of all context ranks; the output
        elements += query + 2 * key * parallel.context + query
        pads = section.attention in ("shared_prefix", "segments") or section.dtype == "float32"
        elements += query if pads else 0  # once more, in the tokens' order
        elements += mixed + in_order if spec.qk_norm else 0  # before their norm
        float32 += heads  # the softmax's normalisation
    if spec.experts is None:  # gate and up; unless it is computed again, silu(gate) and its product with up
        elements += (2 if recompute == "selective" else 4) * spec.intermediate_size / tp
    else:  # of each token's experts: input, gate and up; unless they are computed again, silu(gate), its
        # product with up, and that scaled; what the router says
        routed, kept = spec.experts.per_token / sp, 2 if recompute == "selective" else 5
        elements += routed * (spec.hidden_size + kept * spec.experts.intermediate_size)
        float32 += 2 * spec.experts.num / sp
    return int(elements * size + float32 * FP32)


def _working(spec: ModelSpec, section: RoleSection, stage: int, is_update: bool) -> int:
    """Bytes that the largest step of a pass needs beside what is kept."""
    parallel, size = section.parallel, BYTES[section.dtype]
    budget = section.max_tokens_per_microbatch if is_update else section.max_tokens_per_forward
    tokens = budget // parallel.context
    tp, sp = parallel.tensor, parallel.tensor if parallel.sequence else 1
    if spec.experts is None:
        width = spec.intermediate_size / tp
    else:
        width = spec.experts.intermediate_size * spec.experts.per_token / sp
    hidden = spec.hidden_size / sp
    layer = (4 * width + 3 * hidden) * size  # gate, up, silu(gate) and product; residual, normed, output
    if is_update:
        # gradients of gate, up and product, and one more product, where what the product was kept in is free
        layer = (3 * width + 2 * hidden) * size
        if spec.experts is not None:  # of their outputs
            layer += spec.experts.per_token * hidden * size
        if section.recompute == "selective":  # silu(gate) and the product again
            layer += 2 * width * size
        elif section.recompute in ("full", "offload"):  # all that a layer keeps
            layer += _activations_by_layer(spec, section, "none")
    if stage < parallel.pipeline - 1:
        return int(tokens * layer)
    output = 0
    if spec.head == "language":
        output = LOGITS_AT_ONCE * min(CHUNK_LOGITS, tokens * spec.vocab_size // tp) * FP32
        if is_update:  # the sum over chunks of the hidden states' gradient
            output += tokens * spec.hidden_size * FP32
    output += tokens * spec.hidden_size * size  # rows that have a target, or their gradient
    return max(int(tokens * layer), output)
