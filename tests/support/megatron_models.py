"""Real Megatron-Core modules of every family in any layout, built for their parameters only (never
run forward)."""

from __future__ import annotations

import megatron.core.ssm.gated_delta_net as megatron_gdn
import megatron.core.transformer.multi_latent_attention as megatron_mla
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gyre_megatron.config.model import (
    Architecture,
    GatedDeltaNetArchitecture,
    MlaArchitecture,
    MoeArchitecture,
)
from gyre_megatron.training.gated_delta_net import buildable_without_fla
from gyre_megatron.weights.parallel import Parallelism

SHAPE = dict(
    vocab_size=500,
    hidden_size=64,
    num_layers=4,
    num_attention_heads=8,
    head_dim=16,
    intermediate_size=96,
)
MOE = dict(num_experts=8, experts_per_token=2, intermediate_size=32)

ARCHITECTURES: dict[str, Architecture] = {
    "dense": Architecture(family="qwen3", num_key_value_heads=4, **SHAPE),
    "tied": Architecture(family="qwen3", num_key_value_heads=4, tie_word_embeddings=True, **SHAPE),
    "moe": Architecture(
        family="qwen3_moe", num_key_value_heads=4, moe=MoeArchitecture(**MOE), **SHAPE
    ),
    "mla": Architecture(
        family="deepseek_v3",
        num_key_value_heads=8,
        qk_norm=False,
        **SHAPE,
        mla=MlaArchitecture(
            q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        moe=MoeArchitecture(
            **MOE,
            shared_expert_intermediate_size=32,
            num_dense_layers=1,
            score_function="sigmoid",
            expert_bias=True,
        ),
    ),
    "hybrid": Architecture(
        family="qwen3_next",
        num_key_value_heads=2,
        attention_output_gate=True,
        **SHAPE,
        moe=MoeArchitecture(**MOE, shared_expert_intermediate_size=32, shared_expert_gate=True),
        gdn=GatedDeltaNetArchitecture(
            num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=8
        ),
    ),
}
ARCHITECTURES["mtp"] = ARCHITECTURES["dense"].model_copy(update={"num_mtp_layers": 1})


class _Norm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, **_) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))


class _Core(MegatronModule):
    """Takes the place of the attention core, which has no parameters."""

    def __init__(self, config: TransformerConfig, *_, **__) -> None:
        super().__init__(config=config)


class _Replicated(torch.nn.Module):
    """A projection that every tensor-parallel rank holds whole, as Transformer Engine's duplicated
    linear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )


class _GroupedLinear(MegatronModule):
    """Parameter names and shapes of Transformer Engine's grouped linear."""

    def __init__(self, config: TransformerConfig, count: int, rows: int, columns: int) -> None:
        super().__init__(config=config)
        for index in range(count):
            weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
            self.register_parameter(f"weight{index}", weight)


class _TeGroupedMlp(MegatronModule):
    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *_, pg_collection=None, **__
    ) -> None:
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size // mpu.get_expert_tensor_parallel_world_size()
        self.linear_fc1 = _GroupedLinear(config, num_local_experts, 2 * width, config.hidden_size)
        self.linear_fc2 = _GroupedLinear(config, num_local_experts, config.hidden_size, width)


class _GroupedMlp(MegatronModule):
    """Parameter names and shapes of Megatron's GroupedMLP, which itself needs CUDA's
    grouped_gemm."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *_, pg_collection=None, **__
    ) -> None:
        super().__init__(config=config)
        width = (
            num_local_experts
            * config.moe_ffn_hidden_size
            // mpu.get_expert_tensor_parallel_world_size()
        )
        self.weight1 = torch.nn.Parameter(
            torch.empty(config.hidden_size, 2 * width, dtype=config.params_dtype)
        )
        self.weight2 = torch.nn.Parameter(
            torch.empty(width, config.hidden_size, dtype=config.params_dtype)
        )


_EXPERTS = {"te_grouped": _TeGroupedMlp, "grouped": _GroupedMlp}


def initialize(p: Parallelism) -> None:
    """Make Megatron's groups for layout `p` over the default world."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if (
                group is not dist.group.WORLD
            ):  # Megatron leaves them open: sockets and threads pile up
                dist.destroy_process_group(group)
    mpu.initialize_model_parallel(
        p.tp,
        p.pp,
        p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def build(
    a: Architecture, p: Parallelism, experts: str = "sequential", dtype=torch.float32
) -> list[GPTModel]:
    """This rank's chunks. Call `initialize(p)` first."""
    config = _config(a, p, dtype)
    megatron_mla.HAVE_TE = False
    megatron_mla.TELinear = _Replicated
    chunks = []
    for stage in range(p.vpp) if p.vpp > 1 else [None]:
        place = dict(ignore_virtual=stage is None, vp_stage=stage)
        last = mpu.is_pipeline_last_stage(**place)
        mtp = None
        if a.num_mtp_layers and last:
            mtp = get_gpt_mtp_block_spec(
                config, _layer(a, config, 0, experts), use_transformer_engine=False
            )
            for layer in (
                mtp.submodules.layer_specs if hasattr(mtp, "submodules") else mtp.layer_specs
            ):
                layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = (
                    _Norm
                )
        with buildable_without_fla():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=_block(a, config, experts, stage),
                vocab_size=-(-a.vocab_size // p.tp) * p.tp,
                max_sequence_length=128,
                parallel_output=True,
                pre_process=mpu.is_pipeline_first_stage(**place),
                post_process=last,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=a.tie_word_embeddings,
                vp_stage=stage,
                mtp_block_spec=mtp,
            )
        chunks.append(chunk)
    return chunks


def _config(a: Architecture, p: Parallelism, dtype: torch.dtype) -> TransformerConfig:
    fields = dict(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        ffn_hidden_size=a.intermediate_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        context_parallel_size=1,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        sequence_parallel=p.tp > 1,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=a.num_mtp_layers or None,
    )
    if p.vpp > 1:
        fields |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if p.stage_layers is not None:
        assert p.vpp == 1
        fields |= dict(
            num_layers_in_first_pipeline_stage=len(p.stage_layers[0][0]),
            num_layers_in_last_pipeline_stage=len(p.stage_layers[-1][0]),
        )
    if a.moe is not None:
        fields |= dict(
            num_moe_experts=a.moe.num_experts,
            moe_router_topk=a.moe.experts_per_token,
            moe_ffn_hidden_size=a.moe.intermediate_size,
            moe_grouped_gemm=False,
            moe_aux_loss_coeff=0.0,
            moe_layer_freq=[int(a.is_moe_layer(i)) for i in range(a.num_layers)],
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            moe_router_score_function=a.moe.score_function,
            moe_router_enable_expert_bias=a.moe.expert_bias,
            moe_router_dtype="fp32",
            moe_shared_expert_intermediate_size=a.moe.shared_expert_intermediate_size or None,
            moe_shared_expert_gate=a.moe.shared_expert_gate,
        )
    if a.mla is not None:
        return MLATransformerConfig(
            **fields,
            multi_latent_attention=True,
            q_lora_rank=a.mla.q_lora_rank,
            kv_lora_rank=a.mla.kv_lora_rank,
            qk_head_dim=a.mla.qk_nope_head_dim,
            qk_pos_emb_head_dim=a.mla.qk_rope_head_dim,
            v_head_dim=a.mla.v_head_dim,
            kv_channels=a.mla.v_head_dim,
            rope_type="rope",
        )
    fields |= dict(num_query_groups=a.num_key_value_heads, kv_channels=a.head_dim)
    if a.gdn is not None:
        fields |= dict(
            attention_output_gate=True,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=4,
            linear_conv_kernel_dim=a.gdn.conv_kernel,
            linear_key_head_dim=a.gdn.key_head_dim,
            linear_value_head_dim=a.gdn.value_head_dim,
            linear_num_key_heads=a.gdn.num_key_heads,
            linear_num_value_heads=a.gdn.num_value_heads,
        )
    return TransformerConfig(**fields)


def _block(
    a: Architecture, config: TransformerConfig, experts: str, stage: int | None
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, vp_stage=stage)
    count = get_num_layers_to_build(config, vp_stage=stage)
    specs = [_layer(a, config, layer, experts) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_Norm)


def _layer(a: Architecture, config: TransformerConfig, layer: int, experts: str) -> ModuleSpec:
    moe = a.is_moe_layer(layer)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        multi_latent_attention=a.mla is not None,
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = _Norm
    attention = parts.self_attention.submodules
    attention.core_attention = _Core
    if a.mla is not None:
        attention.q_layernorm = attention.kv_layernorm = _Norm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = _Replicated
    else:
        attention.q_layernorm = attention.k_layernorm = _Norm
    if moe and experts in _EXPERTS:
        parts.mlp.submodules.experts = ModuleSpec(module=_EXPERTS[experts])
    if a.is_gdn_layer(layer):
        parts.self_attention = ModuleSpec(
            module=megatron_gdn.GatedDeltaNet,
            submodules=megatron_gdn.GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear, out_norm=_Norm, out_proj=RowParallelLinear
            ),
        )
    return spec
