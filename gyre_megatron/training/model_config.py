"""Translates an architecture and a training config into Megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from gyre_megatron.config.families import FAMILIES, load_family
from gyre_megatron.config.layout_rules import check_trainable
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(architecture: Architecture, config: TrainingConfig) -> TransformerConfig:
    """Megatron's configuration of this model in this layout.

    Weights are initialised even where a checkpoint follows: Megatron marks tensor-parallel
    parameters only then, and counts unmarked ones once instead of once per rank in the gradient
    norm.

    `calculate_per_token_loss` is always on: Megatron then sums gradients over data- and context-parallel ranks without
    rescaling, which is what edge weights fixed at admission need.

    Raises:
        ConfigError: the trainer has no layers for this model, or its family sets what is not its
            own.
    """
    check_trainable(architecture)
    dtype = DTYPES[config.dtype]
    fields = {
        **_shape(architecture),
        **_no_fusion(),
        **_moe(architecture, config),
        **_gdn(architecture),
        **load_family(architecture.family).transformer_fields(architecture),
    }
    owned = {
        **_layout(config, dtype),
        **_recompute(config),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
    }
    if taken := sorted(fields.keys() & owned.keys()):
        raise ConfigError(
            f"{FAMILIES.key}: {architecture.family} sets {', '.join(taken)} of Megatron's "
            "configuration, which follow from the training section; leave them out of "
            "transformer_fields"
        )
    megatron = TransformerConfig(**fields, **owned)
    megatron.context_parallel_size = (
        config.cp
    )  # late: only Megatron's own Gated DeltaNet refuses it
    return megatron


def _shape(a: Architecture) -> dict[str, Any]:
    return dict(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_key_value_heads,
        kv_channels=a.head_dim,
        ffn_hidden_size=a.intermediate_size or 4 * a.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=a.rms_norm_eps,
        layernorm_zero_centered_gamma=a.gdn is not None,
        qk_layernorm=a.qk_norm,
        attention_output_gate=a.attention_output_gate,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
    )


def _layout(config: TrainingConfig, dtype: torch.dtype) -> dict[str, Any]:
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.expert_tp,
        sequence_parallel=config.uses_sequence_parallel,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    if config.vpp is not None:  # with the defaults, PP=2 interleaved gives silently wrong gradients
        fields |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    return fields


def _no_fusion() -> dict[str, Any]:
    """Fused kernels that exist only with apex or Transformer Engine."""
    fused = [
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
    ]
    fused += [
        "apply_rope_fusion",
        "persist_layer_norm",
        "cross_entropy_loss_fusion",
        "deallocate_pipeline_outputs",
    ]
    return dict.fromkeys(fused, False)


def _recompute(config: TrainingConfig) -> dict[str, Any]:
    if config.recompute == "attention":
        return dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    if config.recompute == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    return {}


def _moe(a: Architecture, config: TrainingConfig) -> dict[str, Any]:
    if a.moe is None:
        return {}
    moe = a.moe
    fields: dict[str, Any] = dict(
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.experts_per_token,
        moe_ffn_hidden_size=moe.intermediate_size,
        moe_layer_freq=[int(a.is_moe_layer(layer)) for layer in range(a.num_layers)],
        moe_router_score_function=moe.score_function,
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=moe.expert_bias,
        moe_router_topk_scaling_factor=moe.routed_scaling_factor
        if moe.routed_scaling_factor != 1.0
        else None,
        moe_router_load_balancing_type="aux_loss" if config.moe_aux_loss else "none",
        moe_aux_loss_coeff=config.moe_aux_loss,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=config.moe_dispatcher,
        moe_grouped_gemm=config.transformer_engine,
    )
    if moe.num_groups > 1:
        fields |= dict(moe_router_num_groups=moe.num_groups, moe_router_group_topk=moe.topk_groups)
    if moe.shared_expert_intermediate_size:
        fields |= dict(
            moe_shared_expert_intermediate_size=moe.shared_expert_intermediate_size,
            moe_shared_expert_gate=moe.shared_expert_gate,
        )
    return fields


def _gdn(a: Architecture) -> dict[str, Any]:
    if a.gdn is None:
        return {}
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=a.gdn.full_attention_interval,
        linear_conv_kernel_dim=a.gdn.conv_kernel,
        linear_key_head_dim=a.gdn.key_head_dim,
        linear_value_head_dim=a.gdn.value_head_dim,
        linear_num_key_heads=a.gdn.num_key_heads,
        linear_num_value_heads=a.gdn.num_value_heads,
    )
