"""Which trajectories go into which bin: as few bins as the budget allows, their costs levelled.

Pure; called by `trajectory.packing`. Invariants: a trajectory lies wholly in one bin, no bin
exceeds the budget, equal input gives equal bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.tree import ExecutionTree


@dataclass(frozen=True)
class Item:
    """Trajectories of one execution that go into a bin together, with the nodes they need.

    Attributes:
        execution: index of the tree in the list that is packed.
        trajectories: indices into the tree's trajectories.
        nodes: indices into the tree's nodes, in depth-first order.
        num_tokens: tokens of those nodes.
        cost: operations, in visible (query, key) pairs.
    """

    tree: ExecutionTree
    execution: int
    trajectories: tuple[int, ...]
    nodes: tuple[int, ...]
    num_tokens: int
    cost: int


def split_into_items(
    tree: ExecutionTree, execution: int, budget: int, linear_cost: int
) -> list[Item]:
    """Cut one execution into as few items as fit the budget; neighbouring branches stay together.

    Raises:
        TrajectoryError: one of its trajectories alone exceeds the budget.
    """
    rank = {node: place for place, node in enumerate(_depth_first(tree))}
    trained = {int(tree.owner[n]) for n, node in tree.trained_nodes() if node.trainable.any()}
    groups: list[_Group] = []
    for j in sorted(trained, key=lambda j: (rank[tree.trajectories[j].leaf], j)):
        path = set(tree.path(tree.trajectories[j].leaf))
        if groups and groups[-1].num_tokens_with(path, tree) <= budget:
            groups[-1].add(j, path, tree)
            continue
        groups.append(_Group([], set(), 0))
        groups[-1].add(j, path, tree)
        if groups[-1].num_tokens > budget:
            raise TrajectoryError(
                f"execution {tree.execution_id}: a {tree.trajectories[j].role} trajectory has "
                f"{groups[-1].num_tokens} tokens but training.token_budget is {budget}; raise "
                "training.token_budget (or context_parallel_size with it)"
            )
    return [_item(tree, execution, group, rank, linear_cost) for group in groups]


@dataclass
class _Group:
    """Trajectories gathered so far, the nodes on their paths, the tokens of those."""

    trajectories: list[int]
    nodes: set[int]
    num_tokens: int

    def num_tokens_with(self, path: set[int], tree: ExecutionTree) -> int:
        return self.num_tokens + sum(len(tree.nodes[n]) for n in path - self.nodes)

    def add(self, trajectory: int, path: set[int], tree: ExecutionTree) -> None:
        self.num_tokens = self.num_tokens_with(path, tree)
        self.nodes |= path
        self.trajectories.append(trajectory)


def _depth_first(tree: ExecutionTree) -> list[int]:
    children: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]
    for index, node in enumerate(tree.nodes):
        children[node.parent].append(index)  # roots hang on the extra last entry (-1)
    order: list[int] = []
    stack = children[-1][::-1]
    while stack:
        index = stack.pop()
        order.append(index)
        stack.extend(reversed(children[index]))
    return order


def _item(
    tree: ExecutionTree, execution: int, group: _Group, rank: dict[int, int], linear_cost: int
) -> Item:
    nodes = sorted(group.nodes, key=rank.__getitem__)
    depth = {-1: 0}
    pairs = 0
    for n in nodes:
        length = len(tree.nodes[n])
        above = depth[tree.nodes[n].parent]
        pairs += length * above + length * (length + 1) // 2
        depth[n] = above + length
    return Item(
        tree=tree,
        execution=execution,
        trajectories=tuple(group.trajectories),
        nodes=tuple(nodes),
        num_tokens=group.num_tokens,
        cost=pairs + linear_cost * group.num_tokens,
    )


def assign_to_bins(items: Sequence[Item], budget: int) -> list[list[Item]]:
    """Fewest bins by first fit decreasing, then costs levelled over that many bins where the budget
    allows it."""
    by_tokens = sorted(items, key=lambda it: (-it.num_tokens, it.execution, it.trajectories))
    fitted: list[list[Item]] = []
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


def _level(items: Sequence[Item], num_bins: int, budget: int) -> list[list[Item]] | None:
    """Longest processing time first into `num_bins` bins; None where the budget does not allow
    it."""
    bins: list[list[Item]] = [[] for _ in range(num_bins)]
    cost = [0] * num_bins
    room = [budget] * num_bins
    for item in sorted(items, key=lambda it: (-it.cost, it.execution, it.trajectories)):
        open_bins = [b for b in range(num_bins) if room[b] >= item.num_tokens]
        if not open_bins:
            return None
        cheapest = min(open_bins, key=lambda b: (cost[b], b))
        bins[cheapest].append(item)
        cost[cheapest] += item.cost
        room[cheapest] -= item.num_tokens
    return [b for b in bins if b]
