"""Packs execution trees into bins: the micro-steps of tree training.

Owns the packed form. The control plane calls `pack`, training reads `PackedBin`. Invariants: nodes
lie in DFS order, so the subtree of a node is one interval of tokens; a trajectory lies wholly in
one bin; an edge's weight depends on its execution and batch alone, never on the bin it landed in.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.tree import ExecutionTree

Denominator = Literal["execution", "batch_tokens", "constant"]


@dataclass(frozen=True)
class PackedBin:
    """A forest of token nodes in DFS order, and the edges that carry the loss.

    Token k is visible to token q exactly when `k <= q < subtree_ends[node(k)]`.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T]; depth of the token on its path, for rotary embeddings.
        node_starts, node_ends, subtree_ends: int32 [M]; token offsets, nodes in DFS order, none
            empty.
        edge_sources: int32 [E]; token whose hidden state predicts the label.
        edge_labels: int32 [E].
        edge_weights: float32 [E]; share of the edge in the batch's loss.
        edge_behaviour_logprobs, edge_temperatures: float32 [E].
        edge_versions: int32 [E]; weight version that sampled the label.
        edge_trajectories: int32 [E]; index into the trajectory columns.
        trajectory_advantages: float32 [J].
        trajectory_executions: int32 [J]; index of the execution in the list that was packed.
        trajectory_roles: str [J].
        bin_weight: float32 []; the bin's share of the batch's unique tokens, each execution
            counting alike.
        routed_experts: int16 [T, num_moe_layers, experts_per_token], -1 where the engine returned
            none; or None.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    node_starts: np.ndarray
    node_ends: np.ndarray
    subtree_ends: np.ndarray
    edge_sources: np.ndarray
    edge_labels: np.ndarray
    edge_weights: np.ndarray
    edge_behaviour_logprobs: np.ndarray
    edge_temperatures: np.ndarray
    edge_versions: np.ndarray
    edge_trajectories: np.ndarray
    trajectory_advantages: np.ndarray
    trajectory_executions: np.ndarray
    trajectory_roles: np.ndarray
    bin_weight: np.ndarray
    routed_experts: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Unique tokens of the bin."""
        return len(self.token_ids)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: the operation count of attention."""
        length = (self.node_ends - self.node_starts).astype(np.int64)
        below = (self.subtree_ends - self.node_ends).astype(np.int64)
        return int((length * (length + 1) // 2 + length * below).sum())

    @classmethod
    def empty(cls) -> PackedBin:
        """A bin without tokens, for a data-parallel replica that has nothing left to do."""
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        kinds: dict[str, Any] = {
            f.name: floats if f.name in _FLOAT_FIELDS else ints for f in fields(cls)
        }
        return cls(
            **(
                kinds
                | {
                    "trajectory_roles": np.zeros(0, "<U1"),
                    "bin_weight": np.float32(0),
                    "routed_experts": None,
                }
            )
        )

    def to_bytes(self) -> bytes:
        """Serialise as an npz archive (no pickle)."""
        buffer = io.BytesIO()
        np.savez(
            buffer, **{f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedBin:
        """Inverse of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return cls(**{name: archive[name] for name in archive.files})


_FLOAT_FIELDS = {
    "edge_weights",
    "edge_behaviour_logprobs",
    "edge_temperatures",
    "trajectory_advantages",
}


@dataclass(frozen=True)
class _Item:
    """Trajectories of one execution that go into a bin together, with the nodes they need (in DFS
    order)."""

    tree: ExecutionTree
    execution: int
    trajectories: tuple[int, ...]
    nodes: tuple[int, ...]
    num_tokens: int
    cost: int


def pack(
    trees: Sequence[ExecutionTree],
    token_budget: int,
    num_executions: int,
    *,
    denominator: Denominator = "execution",
    constant_length: int | None = None,
    keep_executions_whole: bool = False,
    linear_cost: int = 4096,
) -> list[PackedBin]:
    """Pack the selected trajectories of `trees` into balanced bins of at most `token_budget` unique
    tokens.

    Args:
        num_executions: Executions of the whole batch (not only of `trees`): the outer mean of the
            loss.
        denominator: `execution`: mean over an execution's trained tokens; `batch_tokens`: mean over
            all trained tokens of `trees`, times their share of the batch's executions; `constant`:
            sum over `constant_length` (Dr. GRPO).
        keep_executions_whole: never split an execution over bins (needed by the execution-level
            ratio).
        linear_cost: cost of a token's matrix products, in visible pairs (about 6 hidden sizes).

    Raises:
        TrajectoryError: a trajectory does not fit the budget, or a trained token has nothing before
        it.
    """
    if num_executions < 1:
        raise TrajectoryError(
            f"num_executions={num_executions} must be at least 1: it is the denominator of the loss"
        )
    scales = _token_weights(trees, num_executions, denominator, constant_length)
    items = [
        item
        for index, tree in enumerate(trees)
        for item in _split(tree, index, token_budget, keep_executions_whole, linear_cost)
    ]
    tokens = np.zeros(len(trees))
    for item in items:
        tokens[item.execution] += item.num_tokens
    shares = 1.0 / (np.maximum(tokens, 1) * num_executions)
    return [_build_bin(group, scales, shares) for group in _assign(items, token_budget)]


def _token_weights(
    trees: Sequence[ExecutionTree],
    num_executions: int,
    denominator: Denominator,
    constant_length: int | None,
) -> list[float]:
    """Loss weight of one trained token of each tree: fixed here, whatever the packing."""
    if denominator == "constant":
        if not constant_length or constant_length < 1:
            raise TrajectoryError(
                "denominator 'constant' needs constant_length, the tokens to divide by (>= 1)"
            )
        return [1.0 / (constant_length * num_executions)] * len(trees)
    counts = [tree.num_trained_tokens for tree in trees]
    if denominator == "batch_tokens":
        share = len(trees) / num_executions
        return [share / max(1, sum(counts))] * len(trees)
    if denominator != "execution":
        raise TrajectoryError(
            f"denominator {denominator!r} must be 'execution', 'batch_tokens' or 'constant'"
        )
    return [1.0 / (max(1, count) * num_executions) for count in counts]


def _children(tree: ExecutionTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]
    for index, node in enumerate(tree.nodes):
        children[node.parent].append(index)  # roots hang on the extra last entry (-1)
    return children


def _dfs(tree: ExecutionTree) -> list[int]:
    children = _children(tree)
    order, stack = [], children[-1][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return order


def _split(
    tree: ExecutionTree, index: int, budget: int, whole: bool, linear_cost: int
) -> list[_Item]:
    """Cut one execution into as few items as fit the budget; neighbouring branches stay
    together."""
    rank = {node: place for place, node in enumerate(_dfs(tree))}
    trained = {int(tree.owner[i]) for i, node in tree.trained_nodes() if node.trainable.any()}
    order = sorted(trained, key=lambda j: (rank[tree.trajectories[j].leaf], j))
    groups: list[tuple[list[int], set[int]]] = []
    for j in order:
        path = set(tree.path(tree.trajectories[j].leaf))
        length = sum(len(tree.nodes[n]) for n in path)
        if length > budget:
            raise TrajectoryError(
                f"execution {tree.execution_id}: a {tree.trajectories[j].role} trajectory has "
                f"{length} tokens but "
                f"training.token_budget is {budget}; raise training.token_budget (or "
                "context_parallel_size with it)"
            )
        union = groups[-1][1] | path if groups else path
        if groups and sum(len(tree.nodes[n]) for n in union) <= budget:
            groups[-1] = ([*groups[-1][0], j], union)
        else:
            groups.append(([j], path))
    if whole and len(groups) > 1:
        raise TrajectoryError(
            f"execution {tree.execution_id} does not fit one bin of training.token_budget={budget} "
            "tokens, which the "
            "execution-level ratio needs; raise training.token_budget or set "
            "training.gspo.ratio_level to 'trajectory'"
        )
    return [
        _item(tree, index, js, sorted(nodes, key=rank.__getitem__), linear_cost)
        for js, nodes in groups
    ]


def _item(
    tree: ExecutionTree, execution: int, trajectories: list[int], nodes: list[int], linear_cost: int
) -> _Item:
    depth, pairs, total = {-1: 0}, 0, 0
    for n in nodes:
        node, length = tree.nodes[n], len(tree.nodes[n])
        pairs += length * depth[node.parent] + length * (length + 1) // 2
        depth[n] = depth[node.parent] + length
        total += length
    return _Item(
        tree, execution, tuple(trajectories), tuple(nodes), total, pairs + linear_cost * total
    )


def _assign(items: list[_Item], budget: int) -> list[list[_Item]]:
    """Fewest bins by first fit decreasing, then costs levelled over that many bins where the budget
    allows it."""
    by_tokens = sorted(items, key=lambda it: (-it.num_tokens, it.execution, it.trajectories))
    fitted: list[list[_Item]] = []
    room: list[int] = []
    for item in by_tokens:
        place = next((b for b, left in enumerate(room) if left >= item.num_tokens), None)
        if place is None:
            fitted.append([])
            room.append(budget)
            place = len(room) - 1
        fitted[place].append(item)
        room[place] -= item.num_tokens
    return _level(items, len(fitted), budget) or fitted


def _level(items: list[_Item], num_bins: int, budget: int) -> list[list[_Item]] | None:
    """Longest processing time first into `num_bins` bins; None where the budget does not allow
    it."""
    bins: list[list[_Item]] = [[] for _ in range(num_bins)]
    cost, room = [0] * num_bins, [budget] * num_bins
    for item in sorted(items, key=lambda it: (-it.cost, it.execution, it.trajectories)):
        open_bins = [b for b in range(num_bins) if room[b] >= item.num_tokens]
        if not open_bins:
            return None
        best = min(open_bins, key=lambda b: (cost[b], b))
        bins[best].append(item)
        cost[best] += item.cost
        room[best] -= item.num_tokens
    return [b for b in bins if b]


class _Writer:
    """Collects the columns of one bin."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {f.name: [] for f in fields(PackedBin)}
        self.cursor = 0
        self.num_trajectories = 0

    def add(self, **columns: np.ndarray | None) -> None:
        for name, values in columns.items():
            self.columns[name].append(values)

    def add_item(self, item: _Item, weight: float) -> None:
        tree, columns = item.tree, len(item.trajectories)
        local = {j: self.num_trajectories + k for k, j in enumerate(item.trajectories)}
        last = {-1: -1}  # last token on the path that ends with this node
        depth = {-1: 0}
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for n in item.nodes:
            node = tree.nodes[n]
            starts[n], ends[n] = self.cursor, self.cursor + len(node)
            trajectory = local.get(int(tree.owner[n]))
            if trajectory is not None:
                self._edges(item, n, last[node.parent], trajectory, weight)
            self.add(token_ids=node.token_ids, positions=np.arange(len(node)) + depth[node.parent])
            self.add(routed_experts=node.routed_experts)
            depth[n] = depth[node.parent] + len(node)
            self.cursor = ends[n]
            last[n] = self.cursor - 1 if len(node) else last[node.parent]
        subtree = dict(ends)
        for n in reversed(item.nodes):
            parent = tree.nodes[n].parent
            if parent >= 0:
                subtree[parent] = max(subtree[parent], subtree[n])
        kept = [n for n in item.nodes if len(tree.nodes[n])]
        self.add(
            node_starts=np.array([starts[n] for n in kept]),
            node_ends=np.array([ends[n] for n in kept]),
            subtree_ends=np.array([subtree[n] for n in kept]),
            trajectory_advantages=np.full(columns, tree.advantage),
            trajectory_executions=np.full(columns, item.execution),
            trajectory_roles=np.array([tree.trajectories[j].role for j in item.trajectories]),
        )
        self.num_trajectories += columns

    def _edges(self, item: _Item, n: int, before: int, trajectory: int, weight: float) -> None:
        node = item.tree.nodes[n]
        offsets = np.flatnonzero(node.trainable)
        sources = np.where(offsets == 0, before, self.cursor + offsets - 1)
        if (sources < 0).any():
            raise TrajectoryError(
                f"execution {item.tree.execution_id}, node {n}: the first token of a path is "
                "marked trainable, but "
                "nothing comes before it to predict it; a sampled token needs a prompt"
            )
        temperatures = node.temperatures[offsets]
        if (temperatures <= 0).any():
            raise TrajectoryError(
                f"execution {item.tree.execution_id}, node {n}: sampling temperature "
                f"{temperatures.min()} must be "
                "positive; greedy calls have no behaviour log-probability and cannot be trained"
            )
        self.add(
            edge_sources=sources,
            edge_labels=node.token_ids[offsets],
            edge_weights=np.full(len(offsets), weight),
            edge_behaviour_logprobs=node.behaviour_logprobs[offsets],
            edge_temperatures=temperatures,
            edge_versions=node.weight_versions[offsets],
            edge_trajectories=np.full(len(offsets), trajectory),
        )

    def routed_experts(self) -> np.ndarray | None:
        """Routes of all tokens, -1 where unknown; None where no node has any."""
        known = [r for r in self.columns["routed_experts"] if r is not None]
        if not known:
            return None
        lengths = [len(ids) for ids in self.columns["token_ids"]]
        shape = known[0].shape[1:]
        return np.concatenate(
            [
                np.full((n, *shape), -1, np.int16) if r is None else r.astype(np.int16)
                for n, r in zip(lengths, self.columns["routed_experts"], strict=True)
            ]
        )


def _build_bin(items: list[_Item], scales: list[float], shares: np.ndarray) -> PackedBin:
    writer = _Writer()
    for item in sorted(items, key=lambda it: (it.execution, it.trajectories)):
        writer.add_item(item, scales[item.execution])
    packed: dict[str, Any] = {
        "bin_weight": np.float32(sum(item.num_tokens * shares[item.execution] for item in items))
    }
    for name, parts in writer.columns.items():
        if name == "routed_experts":
            packed[name] = writer.routed_experts()
        elif name == "trajectory_roles":
            packed[name] = np.concatenate(parts)
        elif name != "bin_weight":
            kind = np.float32 if name in _FLOAT_FIELDS else np.int32
            packed[name] = np.concatenate([np.asarray(p) for p in parts] or [np.zeros(0)]).astype(
                kind
            )
    return PackedBin(**packed)
