"""Tiny models of the three kinds, as random Hugging Face checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gyre_megatron.config.model import Architecture
from gyre_megatron.weights.canonical import canonical_tensors

VOCAB = 96
_BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
_EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
CONFIGS = {
    "dense": _BASE | dict(model_type="qwen3"),
    "tied": _BASE | dict(model_type="qwen3", tie_word_embeddings=True),
    "moe": _BASE | _EXPERTS | dict(model_type="qwen3_moe"),
    "hybrid": _BASE
    | _EXPERTS
    | dict(
        model_type="qwen3_next",
        shared_expert_intermediate_size=16,
        full_attention_interval=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}
FAMILIES = {"llama": "examples/llama/family.py:Llama"}
"""Kinds whose family is not ours."""
CONFIGS["llama"] = _BASE | dict(model_type="llama", attention_bias=False, mlp_bias=False)


def architecture_of(kind: str) -> Architecture:
    return Architecture.from_hf(CONFIGS[kind], FAMILIES.get(kind, "auto"))


def make_checkpoint(kind: str, directory: Path) -> Path:
    """Write config.json and random weights.

    Scales are large enough that every part matters; for the hybrid, whose keys are divided by their
    own length, small enough that fp32 itself (measured against float64) stays below the tests'
    tolerance.
    """
    scale = 0.08 if kind == "hybrid" else 0.15
    architecture = architecture_of(kind)
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in canonical_tensors(architecture).items():
        values = torch.randn(*shape, generator=generator)
        if name.endswith("A_log"):
            weights[name] = (values.abs() + 0.1).log()
        elif "norm" in name:
            weights[name] = values * 0.1 + (0.0 if kind == "hybrid" and "linear_attn" not in name else 1.0)
        elif name.endswith("conv1d.weight"):
            weights[name] = values * 0.5
        elif name.endswith("mlp.gate.weight"):
            weights[name] = values * 0.6
        else:
            weights[name] = values * scale
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_file(weights, directory / "model.safetensors")
    return directory
