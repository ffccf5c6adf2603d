"""Walking up trees, and the cost of a token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gyre_megatron.config.model import Architecture
from gyre_megatron.trajectory.cost import linear_cost
from gyre_megatron.trajectory.paths import nodes_on_paths, path_to, walk_up, walk_up_indices

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"


@st.composite
def parents_of(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(1, 30)))]


@given(parents=parents_of(), data=st.data())
def test_all_forms_of_the_walk_agree(parents: list[int], data: st.DataObject) -> None:
    leaves = data.draw(st.lists(st.integers(0, len(parents) - 1), max_size=4))
    parent_of = lambda node: None if parents[node] < 0 else parents[node]  # noqa: E731
    union: set[int] = set()
    for leaf in leaves:
        path = path_to(leaf, parents)
        assert path[-1] == leaf and parents[path[0]] == -1
        assert all(parents[below] == above for above, below in pairwise(path))
        assert list(walk_up(leaf, parent_of)) == list(walk_up_indices(leaf, parents)) == path[::-1]
        union |= set(path)
    assert nodes_on_paths(leaves, parents) == sorted(union)
    assert list(walk_up(None, parent_of)) == path_to(-1, parents) == []


def test_depth_is_unbounded() -> None:
    parents = list(range(-1, 99_999))
    assert path_to(99_999, parents) == list(range(100_000))


def test_the_cost_of_a_token_follows_the_model() -> None:
    """A dense model of the usual proportions costs 6.5 hidden sizes of pairs a token."""
    dense = Architecture(
        family="qwen3",
        vocab_size=1000,
        hidden_size=1024,
        num_layers=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        intermediate_size=3072,
    )
    assert linear_cost(dense) == 6.5 * 1024
    costs = {
        file.stem: linear_cost(
            Architecture.model_validate(yaml.safe_load(file.read_text())["model"]["architecture"])
        )
        for file in MODELS.glob("*.yaml")
    }
    # Of 36 layers' 6.95e9 weights over 36 * 32 heads * 256 dimensions.
    assert costs["qwen3_8b"] == pytest.approx(6.95e9 / (36 * 32 * 256), rel=0.01)
    # One layer in four of Qwen3.8 attends, so its tokens weigh more against its pairs.
    assert costs["qwen3_8_2_4t_a95b"] > 4 * costs["qwen3_8b"]
