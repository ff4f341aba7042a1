"""Builds a Megatron GPT model from a Hugging Face folder. Nothing here runs per step but `forward`.

Letters in shapes: T tokens of a packed micro-batch, H hidden size, D size of a head, V vocabulary of
this tensor-parallel rank.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from services.runtime.errors import UserError
from services.runtime.model_spec import ModelSpec
from services.trainer.attention import AttentionInputs, AttentionPlan, TreeAttention
from services.trainer.hf import load_weights
from services.trainer.layers import GatedMLP, RMSNorm, ValueHead
from services.trainer.rope import rotation

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Network(GPTModel):  # type: ignore[misc]
    """GPTModel over packed trees of segments; stops before the output layer, or the value head in its place.

    Log-probabilities are computed from hidden states at the needed positions only, so that the
    [T, vocabulary] logits never exist whole.
    """

    def forward(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [T, H] after the final norm, equal on all tensor-parallel ranks."""
        embedded_T1H = self.embedding(input_ids=tokens_T.unsqueeze(0), position_ids=None)
        turn = rotation(positions_T, self.config.kv_channels, self.rotary_base, embedded_T1H.dtype)
        hidden_T1H = self.decoder(
            hidden_states=embedded_T1H, attention_mask=None, packed_seq_params=AttentionInputs(plan, turn)
        )
        return hidden_T1H.squeeze(1)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Model:
    """A policy, or a value model: see spec.head."""

    network: Network
    spec: ModelSpec
    folder: Path  # where the weights came from; exports take the tokenizer from here


def initialize_parallel(tensor: int, data: int, section: str = "trainer") -> None:
    """Joins the process groups that torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT describe.

    Raises UserError where these are not the ranks that `section` of the config asks for.
    """
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
    if dist.get_world_size() != tensor * data:
        raise UserError(
            f"{section}.parallel needs tensor x data = {tensor} x {data} ranks, got WORLD_SIZE = "
            f"{dist.get_world_size()}: start as many ranks as the product"
        )
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )


def build(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Model:
    """Reads the folder into this rank's shard of a model as `spec` says. Call inside `cpu_compat.apply()`,
    after `initialize_parallel`. A value head that the folder lacks says 0.

    Raises UserError where the folder does not hold such a model.
    """
    network = Network(
        config=_transformer_config(spec, dtype),
        transformer_layer_spec=_block(spec),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="none",  # positions enter in the core attention
        rotary_base=spec.rope_theta,
    )
    if spec.head == "value":
        network.output_layer = ValueHead(spec.hidden_size, dtype)
    _tag_shards(network)
    load_weights(network, spec, folder)
    return Model(network, spec, folder)


def _tag_shards(network: Network) -> None:
    """Megatron tags the weights that it splits when it initialises them, which we skip.

    Without the tag they would count once instead of once per rank in the gradient norm.
    """
    for module in network.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=1, stride=1)


def output_weight(network: Network) -> Tensor:
    """The vocabulary-parallel output weight [V, H], also where it is the embedding.

    Whoever multiplies hidden states with it sums their gradient over the tensor-parallel ranks: each
    rank's covers only its own part of the vocabulary.
    """
    if network.share_embeddings_and_output_weights:
        return network.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
    return network.output_layer.weight  # type: ignore[no-any-return]


def _transformer_config(spec: ModelSpec, dtype: torch.dtype) -> TransformerConfig:
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        calculate_per_token_loss=True,  # data-parallel gradients are summed: the loss weights carry the mean
        perform_initialization=False,  # every parameter is read from the folder
        # these need CUDA kernels
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
    )


def _block(spec: ModelSpec) -> TransformerBlockSubmodules:
    """Megatron's own layers, with our norm and core attention."""
    head_norm = RMSNorm if spec.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=TreeAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=ModuleSpec(
            module=GatedMLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
    )
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(module=TransformerLayer, submodules=layer)] * spec.num_layers,
        layer_norm=RMSNorm,
    )
