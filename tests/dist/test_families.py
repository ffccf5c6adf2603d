"""Families of one's own on real ranks: they train in any layout, change layers, and are refused by
name where they cannot work. (Llama's gradients: test_against_hf.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.trajectory.packing import pack
from tests.dist.gradients import make_trainer, run_batches
from tests.dist.tiny import FAMILIES, VOCAB, make_checkpoint
from tests.unit.random_trees import random_tree

MINE = "tests.support.families"


def bins():
    trees = [random_tree(1500 + i, vocab=VOCAB, max_children=3) for i in range(6)]
    return pack(trees, 1024, len(trees))


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(cp=2)], ids=["tp2", "pp2", "cp2"])
def test_llama_trains_alike_in_every_layout(layout: dict, ranks, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    run = lambda size, **layout: ranks(size).run(  # noqa: E731
        run_batches, checkpoint, TrainingConfig(token_budget=1024, **layout), [bins()], 1, FAMILIES["llama"]
    )[0][0]
    (alone, logprobs, gradients), (sums, divided, found) = run(1), run(2, **layout)
    assert sums["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for a, b in zip(divided, logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert found.keys() == gradients.keys()
    assert not [name for name in found if "q_norm" in name or "k_norm" in name]
    for name, expected in gradients.items():
        assert float((found[name] - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-9, name


def describe(checkpoint: Path, family: str) -> list[tuple[str, float]]:
    """(activation, dropout) of every layer here, as Megatron built them."""
    trainer = make_trainer(checkpoint, TrainingConfig(pp=2), family=family)
    layers = trainer.model_chunks[0].decoder.layers
    return [(layer.mlp.activation_func.__name__, layer.hidden_dropout) for layer in layers]


def test_a_family_changes_megatrons_configuration_and_its_layers(ranks, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("dense", tmp_path / "dense")
    first, last = ranks(2).run(describe, checkpoint, f"{MINE}:Relu")
    assert [*first, *last] == [("relu", layer / 1000) for layer in range(4)]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Biased", "builds parameters that cannot be loaded or published"),
        ("Biased", "linear_qkv.bias"),
        ("Greedy", "sets bf16, tensor_model_parallel_size of Megatron's configuration"),
    ],
)
def test_what_is_not_open_is_refused_by_name(
    family: str, message: str, ranks, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("dense", tmp_path / "dense")
    with pytest.raises(RuntimeError, match="ConfigError: model.family: ") as refused:
        ranks(1).run(describe_alone, checkpoint, f"{MINE}:{family}")
    assert message in str(refused.value)


def describe_alone(checkpoint: Path, family: str) -> None:
    make_trainer(checkpoint, TrainingConfig(), family=family)
