"""Model families as users might bring them, right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_megatron.config.families import ModelFamily


class Relu(ModelFamily):
    """Qwen3 with another activation and a mark on every layer's spec."""

    def transformer_fields(self, architecture) -> dict[str, Any]:
        import torch

        return {"activation_func": torch.nn.functional.relu}

    def layer_spec(self, spec, config, layer: int):
        spec.params = {**(spec.params or {}), "hidden_dropout": layer / 1000}
        return spec


class Biased(ModelFamily):
    """Layers with parameters that no layout knows."""

    def transformer_fields(self, architecture) -> dict[str, Any]:
        return {"add_qkv_bias": True}


class Greedy(ModelFamily):
    """Wants to decide the parallel layout."""

    def transformer_fields(self, architecture) -> dict[str, Any]:
        return {"tensor_model_parallel_size": 2, "bf16": True}


class Short(ModelFamily):
    """Leaves out what an architecture must have."""

    def architecture(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"vocab_size": config["vocab_size"]}


def no_family() -> dict[str, Any]:
    return {}


def wants_an_argument(config) -> ModelFamily:
    return ModelFamily()
