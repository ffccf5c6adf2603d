"""What a token costs beside attention, for levelling bins: pure arithmetic on an architecture."""

from __future__ import annotations

from gyre_megatron.config.model import Architecture


def linear_cost(architecture: Architecture) -> int:
    """Operations of one token's matrix products over those of one visible (query, key) pair.

    A bin costs `pairs + linear_cost * tokens` in this unit. Both sides are counted over all layers
    of the forward pass (the backward pass doubles both): 2 operations a weight that a token meets,
    2 a dimension of each head's query-key and weight-value product. The output projection is left
    out: it runs for trained tokens only.
    """
    layers = range(architecture.num_layers)
    weights = sum(_mixer_weights(architecture, layer) for layer in layers)
    weights += sum(_mlp_weights(architecture, layer) for layer in layers)
    num_attention_layers = sum(not architecture.is_gdn_layer(layer) for layer in layers)
    pair = num_attention_layers * architecture.num_attention_heads * sum(_head_dims(architecture))
    # A model without full attention has no pairs: only tokens count then.
    return max(1, round(weights / max(1, pair)))


def _head_dims(architecture: Architecture) -> tuple[int, int]:
    """Dimensions of a head's (query and key, value)."""
    if (mla := architecture.mla) is not None:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
    return architecture.head_dim, architecture.head_dim


def _mixer_weights(architecture: Architecture, layer: int) -> int:
    if architecture.is_gdn_layer(layer):
        return _gdn_weights(architecture)
    if architecture.mla is not None:
        return _mla_weights(architecture)
    hidden = architecture.hidden_size
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = 2 * architecture.num_key_value_heads * architecture.head_dim
    gate = query if architecture.attention_output_gate else 0
    return hidden * (query + gate + key_value) + query * hidden


def _mla_weights(architecture: Architecture) -> int:
    mla = architecture.mla
    assert mla is not None  # the caller looked
    hidden = architecture.hidden_size
    heads = architecture.num_attention_heads
    query_dim, value_dim = _head_dims(architecture)
    query = hidden * heads * query_dim
    if mla.q_lora_rank is not None:
        query = mla.q_lora_rank * (hidden + heads * query_dim)
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + value_dim)
    return query + down + up + heads * value_dim * hidden


def _gdn_weights(architecture: Architecture) -> int:
    gdn = architecture.gdn
    assert gdn is not None  # the caller looked
    key = gdn.num_key_heads * gdn.key_head_dim
    value = gdn.num_value_heads * gdn.value_head_dim
    projections = architecture.hidden_size * (2 * key + 2 * value + 2 * gdn.num_value_heads)
    output = value * architecture.hidden_size
    # Each token reads its head's state twice and writes it once.
    state = 3 * gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim
    return projections + output + state


def _mlp_weights(architecture: Architecture, layer: int) -> int:
    hidden = architecture.hidden_size
    moe = architecture.moe
    if moe is None or not architecture.is_moe_layer(layer):
        return 3 * hidden * architecture.intermediate_size
    experts = moe.experts_per_token * moe.intermediate_size
    width = experts + moe.shared_expert_intermediate_size
    return hidden * (3 * width + moe.num_experts)
