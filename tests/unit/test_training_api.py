"""Public names of training, algos and cpu, and the signatures that others build on."""

from __future__ import annotations

import inspect

import pytest

from gyre_megatron import algos, cpu, training

NAMES = {
    training: [
        "Trainer",
        "TreeBatch",
        "TreeParams",
        "build_model_chunks",
        "make_batch",
        "padded_length",
        "tree_layer_spec",
    ],
    algos: [
        "OBJECTIVES",
        "EdgeBatch",
        "EdgeStatistics",
        "ObjectiveContext",
        "ObjectiveResult",
        "edge_statistics",
        "gspo_loss",
    ],
    cpu: ["CpuReport", "cpu_enabled", "enable_cpu", "local_device", "require_device"],
}


@pytest.mark.parametrize("room", NAMES, ids=lambda room: room.__name__)
def test_names(room) -> None:
    assert room.__all__ == NAMES[room]
    assert all(hasattr(room, name) for name in room.__all__)
    assert set(room.__all__) <= set(dir(room))
    assert not hasattr(room, "no_such_name")


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (lambda: training.Trainer, ["config", "architecture", "checkpoint", "with_optimizer"]),
        (lambda: training.Trainer.begin_batch, ["self", "weight_version"]),
        (lambda: training.Trainer.micro_step, ["self", "bins"]),
        (lambda: training.Trainer.score, ["self", "sequences", "temperature"]),
        (
            lambda: training.tree_layer_spec,
            ["config", "vp_stage", "transformer_engine", "attention"],
        ),
        (lambda: cpu.enable_cpu, []),
    ],
)
def test_signatures(function, parameters: list[str]) -> None:
    assert list(inspect.signature(function()).parameters) == parameters
