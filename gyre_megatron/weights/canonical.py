"""Every tensor of a model in Hugging Face names and global shapes: the space that all layouts
describe.

Source of names and shapes: the `state_dict` of the families' classes in transformers 5.
"""

from __future__ import annotations

from gyre_megatron.config.families import load_family
from gyre_megatron.config.model import Architecture
from gyre_megatron.weights.boxes import Index

EMBEDDING, OUTPUT, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Tensors = dict[str, Index]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}."


def shared_expert_prefix(architecture: Architecture, layer: int) -> str:
    return f"model.layers.{layer}.mlp.{load_family(architecture.family).shared_expert}."


def outer_tensors(architecture: Architecture) -> Tensors:
    """Embedding, final norm and (untied) output layer."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    tensors = {EMBEDDING: shape, FINAL_NORM: (architecture.hidden_size,)}
    return tensors if architecture.tie_word_embeddings else tensors | {OUTPUT: shape}


def layer_tensors(architecture: Architecture, layer: int, experts: bool = True) -> Tensors:
    """Tensors of decoder layer `layer`; layers from `num_layers` on are multi-token-prediction
    layers.

    Args:
        experts: whether to list the routed experts too.
    """
    hidden, prefix = architecture.hidden_size, layer_prefix(layer)
    tensors: Tensors = {
        prefix + n: (hidden,) for n in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    mtp = layer >= architecture.num_layers
    if mtp:
        tensors |= _mtp_tensors(architecture, prefix)
    if architecture.is_gdn_layer(layer) and not mtp:
        tensors |= _gdn_tensors(architecture, prefix + "linear_attn.")
    elif architecture.mla is not None:
        tensors |= _mla_tensors(architecture, prefix + "self_attn.")
    else:
        tensors |= _attention_tensors(architecture, prefix + "self_attn.")
    if architecture.is_moe_layer(layer):
        return tensors | _moe_tensors(architecture, layer, experts)
    return tensors | _mlp_tensors(prefix + "mlp.", architecture.intermediate_size, hidden)


def canonical_tensors(architecture: Architecture) -> Tensors:
    """All tensors of the model, in checkpoint order."""
    tensors = outer_tensors(architecture)
    for layer in range(architecture.num_layers + architecture.num_mtp_layers):
        tensors |= layer_tensors(architecture, layer)
    return tensors


def _mlp_tensors(prefix: str, width: int, hidden: int) -> Tensors:
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _attention_tensors(architecture: Architecture, prefix: str) -> Tensors:
    hidden, head = architecture.hidden_size, architecture.head_dim
    queries, keys = architecture.num_attention_heads * head, architecture.num_key_value_heads * head
    tensors: Tensors = {
        "q_proj": (queries * (2 if architecture.attention_output_gate else 1), hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    if architecture.qk_norm:
        tensors |= {"q_norm": (head,), "k_norm": (head,)}
    return {f"{prefix}{name}.weight": shape for name, shape in tensors.items()}


def _mla_tensors(architecture: Architecture, prefix: str) -> Tensors:
    mla = architecture.mla
    hidden = architecture.hidden_size
    heads = architecture.num_attention_heads
    assert mla is not None
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    tensors: Tensors = {"q_proj": (queries, hidden)}
    if mla.q_lora_rank is not None:
        tensors = {
            "q_a_proj": (mla.q_lora_rank, hidden),
            "q_a_layernorm": (mla.q_lora_rank,),
            "q_b_proj": (queries, mla.q_lora_rank),
        }
    tensors |= {
        "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (mla.kv_lora_rank,),
        "kv_b_proj": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": (hidden, heads * mla.v_head_dim),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in tensors.items()}


def _gdn_tensors(architecture: Architecture, prefix: str) -> Tensors:
    gdn, hidden = architecture.gdn, architecture.hidden_size
    assert gdn is not None
    keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
    return {
        prefix + "in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        prefix + "in_proj_ba.weight": (2 * gdn.num_value_heads, hidden),
        prefix + "conv1d.weight": (2 * keys + values, 1, gdn.conv_kernel),
        prefix + "A_log": (gdn.num_value_heads,),
        prefix + "dt_bias": (gdn.num_value_heads,),
        prefix + "norm.weight": (gdn.value_head_dim,),
        prefix + "out_proj.weight": (hidden, values),
    }


def _moe_tensors(architecture: Architecture, layer: int, experts: bool) -> Tensors:
    moe = architecture.moe
    hidden = architecture.hidden_size
    prefix = layer_prefix(layer) + "mlp."
    assert moe is not None
    tensors: Tensors = {prefix + "gate.weight": (moe.num_experts, hidden)}
    if moe.expert_bias:
        tensors[prefix + "gate.e_score_correction_bias"] = (moe.num_experts,)
    if moe.shared_expert_intermediate_size:
        shared = shared_expert_prefix(architecture, layer)
        tensors |= _mlp_tensors(shared, moe.shared_expert_intermediate_size, hidden)
    if moe.shared_expert_gate:
        tensors[prefix + "shared_expert_gate.weight"] = (1, hidden)
    for expert in range(moe.num_experts) if experts else ():
        tensors |= _mlp_tensors(expert_prefix(layer, expert), moe.intermediate_size, hidden)
    return tensors


def _mtp_tensors(architecture: Architecture, prefix: str) -> Tensors:
    hidden = architecture.hidden_size
    norms = {
        prefix + n: (hidden,) for n in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    return {**norms, prefix + "eh_proj.weight": (hidden, 2 * hidden)}
