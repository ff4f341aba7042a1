"""Builds a Megatron GPT model from a Hugging Face folder. Only `forward` runs in training steps.

Letters in shapes: T tokens of a packed micro-batch, H hidden size, D size of a head, V vocabulary of
this tensor-parallel rank.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from atoll.config.schema import LoraConfig, ParallelConfig
from atoll.runtime.errors import UserError
from atoll.runtime.malloc import keep_freed_memory
from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.activation_offload import OffloadedLayer
from atoll.trainer.megatron.attention import AttentionInputs, AttentionPlan, TreeAttention
from atoll.trainer.megatron.experts import GroupedExperts, skip_sorting
from atoll.trainer.megatron.layers import ExpertRouter, GatedMLP, RMSNorm, RoutedLayer, ValueHead
from atoll.trainer.megatron.rope import compute_rotation

# What the backward pass recomputes: nothing; large but cheap activations, including GatedMLP's product; or
# every layer from its input (Chen et al. 2016, arXiv:1604.06174). "offload" copies activations to the host.
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "offload": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class Network(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline stage or virtual stage, over packed trees of segments.

    The first stage embeds. The last one stops before the output layer or value head: log-probabilities are
    computed from hidden states at the needed positions only, so that the [T, vocabulary] logits never exist
    as a whole.
    """

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, routes_tYC: Tensor | None
    ) -> Tensor:
        """[T, 1, H] hidden states, after the final norm on the last stage; only this rank's tokens if they
        are split over tensor-parallel ranks. Later stages get their input by `set_input_tensor`."""
        embedded_T1H = None
        if self.pre_process:
            embedded_T1H = self.embedding(input_ids=tokens_T.unsqueeze(0), position_ids=None)
        config = self.config
        rotation = compute_rotation(positions_T, self.frequencies, config.params_dtype)
        return self.decoder(  # type: ignore[no-any-return]
            hidden_states=embedded_T1H,
            attention_mask=None,
            packed_seq_params=AttentionInputs(plan, rotation, routes_tYC),
        )


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is computed; ModelSpec is what it computes."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    lora: LoraConfig | None = None  # None: all weights are trained
    seed: int = 0  # of new adapters


@dataclass(frozen=True, slots=True)
class Linears:
    """Module types for the linear layers of attention and dense MLP, and for the norm before them."""

    norm: type  # no operation if `column` normalizes its input
    column: type
    row: type
    checkpoint_names: Mapping[str, str] = field(default_factory=dict)  # prefix in a layer -> in checkpoints


LOCAL = Linears(RMSNorm, ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True, eq=False)
class MegatronModel:
    """This rank's part of a policy or a value model: see spec.head."""

    chunks: tuple[Network, ...]  # one, or one per virtual pipeline stage
    spec: ModelSpec
    folder: Path  # source of the weights; exports copy the tokenizer from here
    lora: LoraConfig | None = None  # None: no adapters

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return chain.from_iterable(chunk.parameters() for chunk in self.chunks)

    @property
    def output(self) -> Network:
        """The chunk with the output layer or value head, on the last pipeline stage."""
        assert self.chunks[-1].post_process
        return self.chunks[-1]


def initialize_parallel(
    parallel: ParallelConfig, section: str = "trainer", silence: timedelta = timedelta(minutes=10)
) -> None:
    """Joins the process groups that torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT describe.

    A rank that waits for another one for longer than `silence` fails: the other one makes no progress either.
    Raises UserError if they do not match the parallelism in `section` of the config.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)  # the only one that this process sees (config/placement.py)
    else:
        keep_freed_memory()
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=silence)
    if dist.get_world_size() != parallel.world_size:
        raise UserError(
            f"{section}.parallel needs tensor x pipeline x context x data = {parallel.tensor} x "
            f"{parallel.pipeline} x {parallel.context} x {parallel.data} ranks, got WORLD_SIZE = "
            f"{dist.get_world_size()}: start as many ranks as the product"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # experts are not split
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(silence / timedelta(minutes=1)),
    )
    with cpu_compat.apply():  # the embedding's dropout asks for a random state, even at rate 0
        model_parallel_cuda_manual_seed(0)


def build(folder: Path, spec: ModelSpec, settings: ModelSettings) -> MegatronModel:
    """This rank's part of a model of `spec`, with uninitialized weights; a value head is 0.

    Call it inside `cpu_compat.apply()`, after `initialize_parallel`.
    """
    config = _transformer_config(spec, settings)
    # an adapter needs the norm's output, which TransformerEngine's fused layer does not expose
    linears = _fused_linears() if uses_transformer_engine() and settings.lora is None else LOCAL
    num_vp_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stages = [None] if num_vp_stages is None else list(range(num_vp_stages))
    layer = OffloadedLayer if settings.recompute == "offload" else RoutedLayer
    networks = tuple(_network(spec, config, layer, linears, stage) for stage in stages)
    return MegatronModel(networks, spec, folder, settings.lora)


def uses_transformer_engine() -> bool:
    """Its kernels fuse a norm with the following matrix. Attention, which shares prefixes, and experts stay
    ours. Without its extension for PyTorch, which pip installs apart, it has no kernels for us."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def _fused_linears() -> Linears:
    from megatron.core.extensions import transformer_engine

    column, row = transformer_engine.TELayerNormColumnParallelLinear, transformer_engine.TERowParallelLinear
    names = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    return Linears(IdentityOp, column, row, names)


def _network(
    spec: ModelSpec, config: TransformerConfig, layer: type, linears: Linears, vp_stage: int | None
) -> Network:
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    network = Network(
        config=config,
        transformer_layer_spec=_block(spec, config, layer, linears, vp_stage),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=is_last,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="none",  # the core attention applies positions
        vp_stage=vp_stage,
    )
    even = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=torch.cuda.current_device())
    network.register_buffer("frequencies", spec.rotary_frequencies(even), persistent=False)
    if is_last and spec.head == "value":
        network.output_layer = ValueHead(spec.hidden_size, config.params_dtype)
    for module in network.modules():
        if isinstance(module, MoELayer):
            skip_sorting(module)
    _tag_shards(network)
    return network


def _tag_shards(network: Network) -> None:
    """Tags split weights. Megatron does so when it initializes them, which we skip; TransformerEngine and
    GroupedExperts tag their own.

    Without the tag, only one rank's part of them would count in the gradient norm.
    """
    for module in network.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=1, stride=1)


def output_weight(model: MegatronModel) -> Tensor:
    """The vocabulary-parallel output weight [V, H], which may be the embedding. Only on the last stage.

    Callers that multiply hidden states by it must sum the hidden states' gradient over the tensor-parallel
    ranks: each rank covers only its part of the vocabulary.
    """
    network = model.output
    if network.share_embeddings_and_output_weights:
        return network.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
    return network.output_layer.weight  # type: ignore[no-any-return]


def _transformer_config(spec: ModelSpec, settings: ModelSettings) -> TransformerConfig:
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    num_vp_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=settings.sequence_parallel,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=num_vp_stages,
        # Micro-batches differ in their numbers of tokens, so stages announce sizes before they send. With
        # virtual stages that fails: each of two stages both precedes and follows the other, Megatron posts
        # both messages at once, and one may be mistaken for the other. Then all sizes are equal, and the two
        # directions use different groups, as in Megatron without batched sends.
        variable_seq_lengths=pipeline > 1 and num_vp_stages is None,
        batch_p2p_comm=num_vp_stages is None,
        overlap_p2p_comm=num_vp_stages is not None,
        moe_token_dispatcher_type="alltoall",  # the only one that Megatron supports with variable lengths
        **_expert_settings(spec),
        calculate_per_token_loss=True,  # data-parallel gradients are summed: the loss weights carry the mean
        perform_initialization=False,  # every parameter is loaded from the folder
        **RECOMPUTE[settings.recompute],
        gradient_accumulation_fusion=False,  # of the output layer too, for which Megatron requires Apex
        persist_layer_norm=False,  # of Megatron's norm, which we replace
        apply_rope_fusion=False,  # the core attention rotates
        bias_dropout_fusion=False,  # there is no bias or dropout: the one addition left cannot be fused
    )


def _expert_settings(spec: ModelSpec) -> dict[str, Any]:
    if spec.experts is None:
        return {}
    return {
        "num_moe_experts": spec.experts.num,
        "moe_router_topk": spec.experts.per_token,
        "moe_ffn_hidden_size": spec.experts.intermediate_size,
        # normalizing the chosen probabilities equals a softmax over the chosen logits
        "moe_router_pre_softmax": not spec.experts.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
    }


def _block(
    spec: ModelSpec, config: TransformerConfig, layer: type, linears: Linears, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Megatron's own layers of this stage, with our norm and core attention."""
    head_norm = RMSNorm if spec.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=linears.column,
        core_attention=TreeAttention,
        linear_proj=linears.row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=linears.norm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if spec.experts else linears.norm,
        mlp=_experts() if spec.experts else _dense(linears),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=dict(linears.checkpoint_names),
    )
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(module=layer, submodules=submodules)]
        * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=RMSNorm,
    )


def _dense(linears: Linears) -> ModuleSpec:
    return ModuleSpec(
        module=GatedMLP, submodules=MLPSubmodules(linear_fc1=linears.column, linear_fc2=linears.row)
    )


def _experts() -> ModuleSpec:
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(router=ExpertRouter, experts=GroupedExperts))
