"""Llama 2 and 3 as a family of one's own: `model.family: examples/llama/family.py:Llama`.

Its tensors are named and shaped like those of dense Qwen3, without the norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_megatron.config.families import ModelFamily
from gyre_megatron.errors import ConfigError


class Llama(ModelFamily):
    """Dense, without biases, with plain rotary embeddings."""

    parts = ()

    def architecture(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses what an `Architecture` cannot say, instead of training something else."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        refused = {
            "attention_bias": config.get("attention_bias"),
            "mlp_bias": config.get("mlp_bias"),
            "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
            "hidden_act": config.get("hidden_act", "silu") != "silu",
        }
        if found := [name for name, value in refused.items() if value]:
            raise ConfigError(f"this Llama has {', '.join(found)} that the trainer does not know")
        return super().architecture(config) | {"qk_norm": False}
