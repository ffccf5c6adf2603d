"""The model's shape in Gyre's words, from Megatron's: the inverse of `training.model_config`.

Part of `integrations.megatron`, which exports it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError


def architecture_of(
    config: TransformerConfig,
    *,
    vocab_size: int,
    rope_theta: float,
    partial_rotary_factor: float = 1.0,
    max_position_embeddings: int = 32_768,
    tie_word_embeddings: bool = False,
    family: str | None = None,
) -> Architecture:
    """The model's shape in Gyre's words, from Megatron's configuration.

    Where there is a Hugging Face checkpoint, `Architecture.from_checkpoint` is the shorter way;
    `training_config` then compares the two.

    Args:
        vocab_size: tokens of the tokenizer, without Megatron's padding.
        rope_theta, partial_rotary_factor: base of the rotary embeddings, and the share of a head
            that rotates.
        family: as `model.family`; None takes ours that has these layers.

    Raises:
        ConfigError: the configuration describes a model that no `Architecture` can.
    """
    variant = getattr(config, "experimental_attention_variant", None)
    if variant not in (None, "gated_delta_net"):
        raise ConfigError(f"experimental_attention_variant={variant!r} has no layout of weights")
    moe = None if config.num_moe_experts is None else _moe(config)
    mla = _mla(config) if config.multi_latent_attention else None
    gdn = _gdn(config) if variant else None
    own = "deepseek_v3" if mla else "qwen3_next" if gdn else "qwen3_moe" if moe else "qwen3"
    heads = config.num_attention_heads
    return Architecture.model_validate(
        dict(
            family=family or own,
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=config.num_query_groups or heads,
            head_dim=config.kv_channels or config.hidden_size // heads,
            intermediate_size=config.ffn_hidden_size,
            rms_norm_eps=config.layernorm_epsilon,
            rope_theta=rope_theta,
            partial_rotary_factor=partial_rotary_factor,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=tie_word_embeddings,
            qk_norm=config.qk_layernorm and mla is None,
            attention_output_gate=bool(getattr(config, "attention_output_gate", False)),
            num_mtp_layers=config.mtp_num_layers or 0,
            moe=moe,
            mla=mla,
            gdn=gdn,
        )
    )


def _moe(config: TransformerConfig) -> dict[str, Any]:
    frequency = config.moe_layer_freq
    layers = (
        list(frequency)
        if isinstance(frequency, list)
        else [int(layer % frequency == 0) for layer in range(config.num_layers)]
    )
    num_dense = layers.index(1) if 1 in layers else len(layers)
    if 0 in layers[num_dense:]:
        raise ConfigError(
            f"moe_layer_freq={frequency}: dense layers after the first with experts have no layout "
            "of weights; only leading layers may be dense"
        )
    softmax = config.moe_router_score_function == "softmax"
    return dict(
        num_experts=config.num_moe_experts,
        experts_per_token=config.moe_router_topk,
        intermediate_size=config.moe_ffn_hidden_size,
        shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size or 0,
        shared_expert_gate=bool(getattr(config, "moe_shared_expert_gate", False)),
        num_dense_layers=num_dense,
        normalize_topk=not (softmax and config.moe_router_pre_softmax),
        score_function=config.moe_router_score_function,
        expert_bias=config.moe_router_enable_expert_bias,
        num_groups=config.moe_router_num_groups or 1,
        topk_groups=config.moe_router_group_topk or 1,
        routed_scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
    )


def _mla(config: Any) -> dict[str, Any]:
    return dict(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim,
        qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
    )


def _gdn(config: TransformerConfig) -> dict[str, Any]:
    if not isinstance(config.linear_attention_freq, int):
        raise ConfigError(
            f"linear_attention_freq={config.linear_attention_freq}: a number was expected, every "
            "n-th layer being full attention"
        )
    return dict(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        full_attention_interval=config.linear_attention_freq,
    )


def architecture_from_args(
    args: Any, config: TransformerConfig, family: str | None = None
) -> Architecture:
    """The same from the arguments of a Megatron-LM program and the configuration made of them.

    Args:
        args: has `vocab_size`, `rotary_base`, `rotary_percent`, `max_position_embeddings` and
            `untie_embeddings_and_output_weights`, as `megatron.training.get_args()` gives them.

    Raises:
        ConfigError: `args.vocab_size` is not set (with a Hugging Face tokenizer Megatron-LM knows
            only the padded size), or as `architecture_of`.
    """
    if not args.vocab_size:
        raise ConfigError(
            "args.vocab_size is not set: give --vocab-size, the tokens of the tokenizer without "
            "padding, or read the architecture with Architecture.from_checkpoint"
        )
    return architecture_of(
        config,
        vocab_size=args.vocab_size,
        rope_theta=args.rotary_base,
        partial_rotary_factor=args.rotary_percent,
        max_position_embeddings=args.max_position_embeddings,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        family=family,
    )
