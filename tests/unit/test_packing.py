"""Packing: structure, alignment of edges, denominators and limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.packing import PackedBin, pack
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode
from tests.unit.random_trees import random_tree


def node(
    parent: int, ids: list[int], trainable: bool, routes: np.ndarray | None = None
) -> TreeNode:
    n = len(ids)
    return TreeNode(
        parent=parent,
        token_ids=np.array(ids, np.int32),
        trainable=np.full(n, trainable),
        behaviour_logprobs=np.where(trainable, -np.array(ids) / 10, 0).astype(np.float32),
        weight_versions=np.full(n, 3 if trainable else -1, np.int32),
        temperatures=np.full(n, 0.7 if trainable else 1.0, np.float32),
        routed_experts=routes,
    )


def branching_tree(**changes) -> ExecutionTree:
    """A prompt, an answer, then two ways on; the second branch point sits right behind the
    answer."""
    nodes = (
        node(-1, [10, 11, 12], False),
        node(0, [20, 21], True),
        node(1, [30], False),
        node(2, [40, 41], True),
        node(1, [50], True),
        node(4, [], False),
        node(5, [60, 61], True),
    )
    tree = ExecutionTree(
        "e",
        "g",
        1.0,
        0.5,
        nodes,
        (Trajectory(3, "main"), Trajectory(6, "sub_agent")),
        np.array([-1, 0, -1, 0, 1, -1, 1]),
    )
    return dataclasses.replace(tree, **changes)


def test_layout_of_a_branching_tree() -> None:
    (packed,) = pack([branching_tree()], 64, 2)
    assert packed.token_ids.tolist() == [10, 11, 12, 20, 21, 30, 40, 41, 50, 60, 61]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7]
    assert packed.node_starts.tolist() == [0, 3, 5, 6, 8, 9]  # the empty node is gone
    assert packed.subtree_ends.tolist() == [11, 11, 8, 8, 11, 11]
    # Token 4 predicts 50 (a branch point); token 5 predicts 40; the owner of [20, 21] is the first
    # trajectory.
    edges = list(
        zip(
            packed.edge_sources.tolist(),
            packed.edge_labels.tolist(),
            packed.edge_trajectories,
            strict=True,
        )
    )
    assert edges == [
        (2, 20, 0),
        (3, 21, 0),
        (5, 40, 0),
        (6, 41, 0),
        (4, 50, 1),
        (8, 60, 1),
        (9, 61, 1),
    ]
    assert packed.edge_behaviour_logprobs.tolist() == pytest.approx(
        [-2.0, -2.1, -4.0, -4.1, -5.0, -6.0, -6.1]
    )
    assert packed.edge_weights.tolist() == pytest.approx([1 / (7 * 2)] * 7)
    assert set(packed.edge_versions) == {3} and packed.edge_temperatures.tolist() == pytest.approx(
        [0.7] * 7
    )
    assert packed.trajectory_roles.tolist() == ["main", "sub_agent"]


def test_unselected_branches_are_left_out_and_untrained_tokens_have_no_edge() -> None:
    tree = branching_tree(owner=np.array([-1, 0, -1, 0, -1, -1, -1]))
    (packed,) = pack([tree], 64, 1)
    assert packed.token_ids.tolist() == [10, 11, 12, 20, 21, 30, 40, 41]
    assert packed.edge_labels.tolist() == [20, 21, 40, 41]
    assert pack([branching_tree(owner=np.full(7, -1))], 64, 1) == []


def edges_by_label(bins: list[PackedBin]) -> list[tuple]:
    columns = (
        "edge_labels",
        "edge_weights",
        "edge_behaviour_logprobs",
        "edge_temperatures",
        "edge_versions",
    )
    rows = []
    for b in bins:
        executions = b.trajectory_executions[b.edge_trajectories]
        rows += list(
            zip(executions.tolist(), *(getattr(b, c).tolist() for c in columns), strict=True)
        )
    return sorted(rows)


@pytest.mark.parametrize("seed", range(20))
def test_denominators_do_not_depend_on_the_bins(seed: int) -> None:
    """Same edges with bit-equal weights whatever the budget, the order of trees or their
    company."""
    trees = [random_tree(31 * seed + i) for i in range(12)]
    longest = max(
        sum(len(t.nodes[n]) for n in t.path(j.leaf)) for t in trees for j in t.trajectories
    )
    wide, narrow = pack(trees, 4096, 12), pack(trees, longest, 12)
    assert len(narrow) > len(wide)
    assert edges_by_label(wide) == edges_by_label(narrow)
    alone = [
        edge for i, tree in enumerate(trees) for edge in edges_by_label(pack([tree], 4096, 12))
    ]
    assert sorted(e[1:] for e in edges_by_label(wide)) == sorted(e[1:] for e in alone)


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_deterministic_whole_and_within_budget(seed: int) -> None:
    trees = [random_tree(77 * seed + i) for i in range(10)]
    budget = 200
    bins = pack(trees, budget, 10)
    assert [b.to_bytes() for b in bins] == [b.to_bytes() for b in pack(trees, budget, 10)]
    seen: dict[tuple[int, int], int] = {}
    for number, b in enumerate(bins):
        assert b.num_tokens <= budget
        assert (b.edge_sources >= 0).all() and (b.edge_sources < b.num_tokens).all()
        for j in range(len(b.trajectory_advantages)):
            sources = b.edge_sources[b.edge_trajectories == j]
            # A trajectory's edges all start on one path: each source sees the one before it.
            until = np.repeat(b.subtree_ends, b.node_ends - b.node_starts)
            assert (until[sources[:-1]] > sources[1:]).all()
            key = (int(b.trajectory_executions[j]), int(sources[0]))
            seen[key] = number
    assert float(sum(b.edge_weights.sum() for b in bins)) == pytest.approx(
        sum(t.num_trained_tokens > 0 for t in trees) / 10, rel=1e-5
    )


def test_costs_are_levelled() -> None:
    """One deep trajectory against many shallow ones: bins differ little in cost."""
    deep = [long_tree(400)] * 2
    shallow = [long_tree(50)] * 16
    bins = pack(deep + shallow, 600, 18, linear_cost=1)
    costs = [b.num_pairs for b in bins]
    assert len(bins) == 3 and max(costs) < 2 * min(c for c in costs if c > 80_000)


def long_tree(n: int) -> ExecutionTree:
    nodes = (node(-1, [1], False), node(0, list(range(n - 1)), True))
    return ExecutionTree("e", "g", 1.0, 1.0, nodes, (Trajectory(1, "main"),), np.array([-1, 0]))


def test_round_trip_through_bytes() -> None:
    for b in (*pack([random_tree(i) for i in range(6)], 300, 6), PackedBin.empty()):
        again = PackedBin.from_bytes(b.to_bytes())
        for field in dataclasses.fields(PackedBin):
            left, right = getattr(b, field.name), getattr(again, field.name)
            assert (left is None) == (right is None)
            if left is not None:
                assert (
                    np.array_equal(left, right)
                    and np.asarray(left).dtype == np.asarray(right).dtype
                )


def test_routes_stay_with_their_tokens() -> None:
    """miles#3277, sglang#36404: routes, like log-probabilities, belong to the token they were
    recorded for."""
    routes = lambda ids: np.array(ids, np.int16)[:, None, None] * np.ones((1, 2, 1), np.int16)  # noqa: E731
    tree = branching_tree()
    nodes = list(tree.nodes)
    for i in (1, 3, 4):
        nodes[i] = dataclasses.replace(nodes[i], routed_experts=routes(nodes[i].token_ids.tolist()))
    for budget in (64, 9):
        for packed in pack([dataclasses.replace(tree, nodes=tuple(nodes))], budget, 1):
            known = packed.routed_experts[:, 0, 0]
            assert ((known == packed.token_ids) | (known == -1)).all()
            assert (known[np.isin(packed.token_ids, [20, 21, 40, 41, 50])] > 0).all()
            assert (known[np.isin(packed.token_ids, [10, 30, 60, 61])] == -1).all()


class TestRefusals:
    def test_a_trajectory_longer_than_the_budget_names_the_knob(self) -> None:
        with pytest.raises(
            TrajectoryError, match=r"main trajectory has 8 tokens but training\.token_budget is 7"
        ):
            pack([branching_tree()], 7, 1)

    def test_a_first_token_cannot_be_trained(self) -> None:
        nodes = (node(-1, [1, 2], True),)
        tree = ExecutionTree("e", "g", 1.0, 1.0, nodes, (Trajectory(0, "main"),), np.array([0]))
        with pytest.raises(TrajectoryError, match="nothing comes before it"):
            pack([tree], 64, 1)

    def test_greedy_tokens_cannot_be_trained(self) -> None:
        nodes = list(branching_tree().nodes)
        nodes[1] = dataclasses.replace(nodes[1], temperatures=np.zeros(2, np.float32))
        with pytest.raises(TrajectoryError, match="must be positive"):
            pack([branching_tree(nodes=tuple(nodes))], 64, 1)

    def test_an_execution_that_must_stay_whole(self) -> None:
        assert len(pack([branching_tree()], 9, 1)) == 2
        with pytest.raises(TrajectoryError, match="ratio_level"):
            pack([branching_tree()], 9, 1, keep_executions_whole=True)

    def test_denominators(self) -> None:
        with pytest.raises(TrajectoryError, match="num_executions=0"):
            pack([branching_tree()], 64, 0)
        with pytest.raises(TrajectoryError, match="constant_length"):
            pack([branching_tree()], 64, 1, denominator="constant")
        (packed,) = pack([branching_tree()], 64, 2, denominator="constant", constant_length=100)
        assert packed.edge_weights.tolist() == pytest.approx([1 / 200] * 7)
        (packed,) = pack([branching_tree(), branching_tree()], 64, 5, denominator="batch_tokens")
        assert packed.edge_weights.tolist() == pytest.approx([2 / 5 / 14] * 14)
