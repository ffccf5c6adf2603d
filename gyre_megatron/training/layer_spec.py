"""Layer specs of tree training: Megatron's own layers with tree attention, tree router and tree
Gated DeltaNet."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from gyre_megatron.errors import ConfigError
from gyre_megatron.training.attention import TreeAttention
from gyre_megatron.training.gated_delta_net import tree_gdn_spec
from gyre_megatron.training.norm import RMSNorm
from gyre_megatron.training.router import TreeRouter
from gyre_megatron.training.tree_batch import TreeParams


class TreeLayer(TransformerLayer):
    """A transformer layer that shows its router the tree of the micro-step."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.router: TreeRouter | None = getattr(self.mlp, "router", None)
        if self.router is not None:
            layer = self.layer_number - 1
            self.router.moe_index = sum(_moe_layers(self.config)[:layer])

    def forward(self, *args, packed_seq_params: TreeParams | None = None, **kwargs):
        """Same as Megatron's layer."""
        if self.router is not None:
            self.router.params = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def __setattr__(self, name: str, value) -> None:
        if name == "router":  # an alias, not a second place in the module tree
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def tree_layer_spec(
    config: TransformerConfig,
    *,
    vp_stage: int | None = None,
    transformer_engine: bool = False,
    attention: str = "auto",
) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage for training on packed trees, to give to `GPTModel` as
    `transformer_layer_spec`.

    Args:
        config: Megatron's config of the model; dense, mixture-of-experts and Gated DeltaNet hybrids
            are supported.
        vp_stage: virtual pipeline stage, where there is one.
        transformer_engine: Transformer Engine's modules (GPU) instead of Megatron's local ones.
        attention: the core of tree attention, as `training.attention`; refused when the model is
            built where it cannot run.

    Raises:
        ConfigError: Transformer Engine is asked for but not installed, or a recompute option would
            lose the tree.
    """
    if transformer_engine and not gpt_layer_specs.HAVE_TE:
        raise ConfigError(
            "transformer_engine=True but transformer-engine is not installed; install it or turn "
            "it off"
        )
    if "moe" in (config.recompute_modules or []) and config.recompute_granularity == "selective":
        raise ConfigError(
            "recompute of 'moe' alone would lose the router's tree; recompute 'core_attn' or full "
            "layers"
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    core = ModuleSpec(module=TreeAttention, params={"core": attention})
    specs = [
        _layer(config, layer, transformer_engine, core) for layer in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(transformer_engine))


def _moe_layers(config: TransformerConfig) -> list[int]:
    """1 for each MoE layer of the model, 0 for a dense one."""
    if config.num_moe_experts is None:
        return [0] * config.num_layers
    frequency = config.moe_layer_freq
    return (
        frequency
        if isinstance(frequency, list)
        else [int(i % frequency == 0) for i in range(config.num_layers)]
    )


def _norm(transformer_engine: bool) -> type[torch.nn.Module]:
    if not transformer_engine:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer(
    config: TransformerConfig, layer: int, transformer_engine: bool, attention_core: ModuleSpec
) -> ModuleSpec:
    build = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if transformer_engine
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    spec = build(
        num_experts=config.num_moe_experts if _moe_layers(config)[layer] else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        **({} if transformer_engine else {"normalization": "RMSNorm"}),
    )
    spec.module = TreeLayer
    parts = spec.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = attention_core
    if not transformer_engine:
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if _moe_layers(config)[layer]:
        parts.mlp.submodules.router = TreeRouter
    if _is_gdn(config, layer):
        parts.self_attention = tree_gdn_spec(config, transformer_engine)
        if transformer_engine:
            parts.input_layernorm = _norm(True)  # in attention layers it is fused into linear_qkv
    return spec


def _is_gdn(config: TransformerConfig, layer: int) -> bool:
    if config.experimental_attention_variant != "gated_delta_net":
        return False
    frequency = config.linear_attention_freq
    return bool(frequency[layer]) if isinstance(frequency, list) else (layer + 1) % frequency != 0
