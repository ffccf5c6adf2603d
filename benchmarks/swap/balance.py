"""How evenly replicas share the sending: planned for a layout pair of a real model."""

from __future__ import annotations

from gyre_megatron.config.loader import load_config
from gyre_megatron.weights.forecast import serving_layout, training_layout
from gyre_megatron.weights.layout import ReplicatedLayout
from gyre_megatron.weights.planner import plan_rank, total_numel

MODEL, TRAIN, SERVE = "qwen3_8b", "tp2,pp2,dp4", "tp4"


def imbalance() -> float:
    """Most bytes that a rank sends or keeps for itself, over the mean of all ranks."""
    architecture = load_config(MODEL, partial=True).config.model.shape()
    train = training_layout(architecture, TRAIN)
    serve = serving_layout(architecture, SERVE)
    engines = ReplicatedLayout(serve, train.num_ranks // serve.num_ranks)
    sent = []
    for rank in range(train.num_ranks):
        plan = plan_rank(train, engines, rank)
        sent.append(sum(total_numel(parcels) for parcels in plan.sends.values()))
    return max(sent) * len(sent) / sum(sent)
