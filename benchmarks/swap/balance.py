"""How evenly replicas share the sending: planned for a layout pair of a real model."""

from __future__ import annotations

from gyre_megatron.config.loader import load_config
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.forecast import imbalance, serving_layout, training_layout
from gyre_megatron.weights.layout import ReplicatedLayout
from gyre_megatron.weights.traffic import traffic

MODEL, TRAIN, SERVE = "qwen3_8b", "tp2,pp2,dp4", "tp4"


def planned_imbalance() -> float:
    """Most bytes that a rank sends, over the mean of all ranks."""
    architecture = load_config(MODEL, partial=True).config.model.shape()
    train = training_layout(architecture, TRAIN)
    serve = serving_layout(architecture, SERVE)
    engines = ReplicatedLayout(serve, train.num_ranks // serve.num_ranks)
    names = canonical_tensors(architecture)
    return imbalance(traffic(train, engines, names, train.num_ranks).out)
