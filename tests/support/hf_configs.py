"""Hugging Face config.json files for the test architectures, in the words of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre_megatron.config.model import Architecture

_CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def hf_config(a: Architecture) -> dict[str, Any]:
    """The config of `a`, so that `Architecture.from_hf` reads it back."""
    config: dict[str, Any] = dict(
        model_type=a.family,
        architectures=[_CLASSES[a.family]],
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_attention_heads,
        head_dim=a.head_dim,
        num_key_value_heads=a.num_key_value_heads,
        intermediate_size=a.intermediate_size,
        hidden_act="silu",
        rms_norm_eps=a.rms_norm_eps,
        max_position_embeddings=2048,
        tie_word_embeddings=a.tie_word_embeddings,
        torch_dtype="float32",
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        attention_bias=False,
        rope_theta=a.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope_theta},
    )
    if a.mla is not None:
        assert a.moe is not None
        config |= dict(
            q_lora_rank=a.mla.q_lora_rank,
            kv_lora_rank=a.mla.kv_lora_rank,
            qk_nope_head_dim=a.mla.qk_nope_head_dim,
            qk_rope_head_dim=a.mla.qk_rope_head_dim,
            v_head_dim=a.mla.v_head_dim,
            n_routed_experts=a.moe.num_experts,
            num_experts_per_tok=a.moe.experts_per_token,
            moe_intermediate_size=a.moe.intermediate_size,
            n_shared_experts=a.moe.shared_expert_intermediate_size // a.moe.intermediate_size,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=a.moe.num_dense_layers,
            moe_layer_freq=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            ep_size=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            num_nextn_predict_layers=0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": a.rope_theta,
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 1024,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        )
        del config["head_dim"]
    elif a.moe is not None:
        config |= dict(
            num_experts=a.moe.num_experts,
            num_experts_per_tok=a.moe.experts_per_token,
            mlp_only_layers=[],
            moe_intermediate_size=a.moe.intermediate_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
    if a.gdn is not None:
        assert a.moe is not None
        config |= dict(
            shared_expert_intermediate_size=a.moe.shared_expert_intermediate_size,
            partial_rotary_factor=0.25,
            linear_num_key_heads=a.gdn.num_key_heads,
            linear_num_value_heads=a.gdn.num_value_heads,
            linear_key_head_dim=a.gdn.key_head_dim,
            linear_value_head_dim=a.gdn.value_head_dim,
            linear_conv_kernel_dim=a.gdn.conv_kernel,
            full_attention_interval=a.gdn.full_attention_interval,
        )
        config["rope_parameters"]["partial_rotary_factor"] = 0.25
    return config


def write_config(a: Architecture, folder: Path) -> Path:
    """Write config.json alone: enough to build a model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(a), indent=1))
    return folder
