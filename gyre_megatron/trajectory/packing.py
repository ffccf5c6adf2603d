"""Packs execution trees into bins: the micro-steps of tree training.

The control plane calls `pack`, training reads the `PackedBin`s. Invariants: a trajectory lies
wholly in one bin; an edge's weight depends on its execution and batch alone, never on the bin it
landed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.bins import Item, assign_to_bins, split_into_items
from gyre_megatron.trajectory.fit import untrainable
from gyre_megatron.trajectory.loss_weights import Denominator, token_weights
from gyre_megatron.trajectory.packed_bin import PackedBin
from gyre_megatron.trajectory.routed_experts import MISSING
from gyre_megatron.trajectory.tree import ExecutionTree

DEFAULT_LINEAR_COST = 4096
"""Cost of a token's matrix products where no model is given: a dense model of hidden size 700."""


def pack(
    trees: Sequence[ExecutionTree],
    token_budget: int | None,
    num_executions: int,
    *,
    denominator: Denominator = "execution",
    constant_length: int | None = None,
    keep_executions_whole: bool = False,
    linear_cost: int = DEFAULT_LINEAR_COST,
    skip_zero_advantage: bool = False,
) -> list[PackedBin]:
    """Pack the selected trajectories of `trees` into balanced bins of at most `token_budget` unique
    tokens.

    Args:
        token_budget: None: no bound, one bin takes all.
        num_executions: Executions that share the loss (not only those of `trees`).
        denominator, constant_length: see `loss_weights.token_weights`.
        keep_executions_whole: never split an execution over bins (needed by the execution-level
            ratio).
        linear_cost: cost of a token's matrix products, in visible pairs (`cost.linear_cost`).
        skip_zero_advantage: leave out executions whose advantage is 0, after the denominators were
            taken over all; right only where they cannot contribute a gradient.

    Raises:
        TrajectoryError: a trajectory does not fit the budget (`fit.split_fitting` sorts such out
            beforehand), or a trained token has nothing before it.
    """
    if token_budget is None:
        token_budget = sum(len(node) for tree in trees for node in tree.nodes)
    weights = token_weights(trees, num_executions, denominator, constant_length)
    items: list[Item] = []
    bin_shares: list[float] = []
    for index, tree in enumerate(trees):
        own = split_into_items(tree, index, token_budget, linear_cost)
        if keep_executions_whole and len(own) > 1:
            raise TrajectoryError(
                f"execution {tree.execution_id} does not fit one bin of training.token_budget="
                f"{token_budget} tokens, which the execution-level ratio needs; raise "
                "training.token_budget or set training.gspo.ratio_level to 'trajectory'"
            )
        bin_shares.append(1.0 / (max(1, sum(it.num_tokens for it in own)) * num_executions))
        if tree.advantage != 0.0 or not skip_zero_advantage:
            items += own
    return [
        PackedBin.concatenate(
            [_pack_item(item, weights[item.execution], bin_shares[item.execution]) for item in bin_]
        )
        for bin_ in map(_in_order, assign_to_bins(items, token_budget))
    ]


def _in_order(items: list[Item]) -> list[Item]:
    return sorted(items, key=lambda it: (it.execution, it.trajectories))


def _pack_item(item: Item, weight: float, token_share: float) -> PackedBin:
    """One item as a bin of its own.

    Args:
        weight: loss weight of each of its edges.
        token_share: share of each of its tokens in the batch's unique tokens.
    """
    tree = item.tree
    spans = _node_spans(item)
    filled = [n for n in item.nodes if len(tree.nodes[n])]
    edges = _edges(item, spans)
    num_trajectories = len(item.trajectories)
    return PackedBin(
        token_ids=_join((tree.nodes[n].token_ids for n in item.nodes), np.int32),
        positions=_join((spans[n].positions for n in item.nodes), np.int32),
        node_starts=np.array([spans[n].start for n in filled], np.int32),
        node_ends=np.array([spans[n].end for n in filled], np.int32),
        subtree_ends=np.array([spans[n].subtree_end for n in filled], np.int32),
        edge_sources=_join((e.sources for e in edges), np.int32),
        edge_labels=_join((e.labels for e in edges), np.int32),
        edge_weights=_join((np.full(len(e.labels), weight) for e in edges), np.float32),
        edge_behaviour_logprobs=_join((e.behaviour_logprobs for e in edges), np.float32),
        edge_temperatures=_join((e.temperatures for e in edges), np.float32),
        edge_versions=_join((e.versions for e in edges), np.int32),
        edge_trajectories=_join((e.trajectories for e in edges), np.int32),
        trajectory_advantages=np.full(num_trajectories, tree.advantage, np.float32),
        trajectory_executions=np.full(num_trajectories, item.execution, np.int32),
        trajectory_roles=np.array([tree.trajectories[j].role for j in item.trajectories]),
        bin_weight=np.asarray(item.num_tokens * token_share, np.float32),
        routed_experts=_routes(item),
    )


@dataclass
class _Span:
    """Where a node lies in its item.

    Attributes:
        start, end: offsets of its tokens.
        depth: tokens on its path before it.
        last_above: offset of the last token above it, -1 where there is none; it predicts the
            node's first token.
        subtree_end: end of the last node below it.
    """

    start: int
    end: int
    depth: int
    last_above: int
    subtree_end: int

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.depth, self.depth + self.end - self.start)

    @property
    def last(self) -> int:
        """Offset of the last token on the path that ends with this node."""
        return self.end - 1 if self.end > self.start else self.last_above


def _node_spans(item: Item) -> dict[int, _Span]:
    nodes = item.tree.nodes
    spans: dict[int, _Span] = {}
    cursor = 0
    for n in item.nodes:
        above = spans.get(nodes[n].parent)
        end = cursor + len(nodes[n])
        depth = above.depth + above.end - above.start if above else 0
        spans[n] = _Span(cursor, end, depth, above.last if above else -1, end)
        cursor = end
    for n in reversed(item.nodes):
        above = spans.get(nodes[n].parent)
        if above is not None:
            above.subtree_end = max(above.subtree_end, spans[n].subtree_end)
    return spans


@dataclass(frozen=True)
class _Edges:
    """The edges into the trained tokens of one node; columns as in PackedBin."""

    sources: np.ndarray
    labels: np.ndarray
    behaviour_logprobs: np.ndarray
    temperatures: np.ndarray
    versions: np.ndarray
    trajectories: np.ndarray


def _edges(item: Item, spans: dict[int, _Span]) -> list[_Edges]:
    place = {j: index for index, j in enumerate(item.trajectories)}
    edges = []
    for n in item.nodes:
        trajectory = place.get(int(item.tree.owner[n]))
        if trajectory is None:
            continue  # context, or trained by a trajectory of another item
        node = item.tree.nodes[n]
        offsets = np.flatnonzero(node.trainable)
        sources = np.where(offsets == 0, spans[n].last_above, spans[n].start + offsets - 1)
        if problem := untrainable(node, starts_path=spans[n].last_above < 0):
            raise TrajectoryError(f"execution {item.tree.execution_id}, node {n}: {problem.detail}")
        edges.append(
            _Edges(
                sources=sources,
                labels=node.token_ids[offsets],
                behaviour_logprobs=node.behaviour_logprobs[offsets],
                temperatures=node.temperatures[offsets],
                versions=node.weight_versions[offsets],
                trajectories=np.full(len(offsets), trajectory),
            )
        )
    return edges


def _routes(item: Item) -> np.ndarray | None:
    """Routes of the item's tokens, MISSING where a node has none; None where no node has any."""
    nodes = [item.tree.nodes[n] for n in item.nodes]
    known = [node.routed_experts for node in nodes if node.routed_experts is not None]
    if not known:
        return None
    row = known[0].shape[1:]
    parts = [
        np.full((len(node), *row), MISSING, np.int16)
        if node.routed_experts is None
        else node.routed_experts
        for node in nodes
    ]
    return np.concatenate(parts).astype(np.int16)


def _join(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
