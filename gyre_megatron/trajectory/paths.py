"""Walking from a node to its root: the one way everybody goes up a tree.

Trees are kept as parent links (an array of parent indices, or nodes found by id), and every caller
needs some form of the same walk. Nothing here recurses: depth is unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Node = TypeVar("Node")


def walk_up(node: Node | None, parent_of: Callable[[Node], Node | None]) -> Iterator[Node]:
    """Yield `node`, its parent and so on, up to the root.

    Args:
        node: where to start; None (nowhere) yields nothing.
        parent_of: the parent of a node, None for a root.
    """
    while node is not None:
        yield node
        node = parent_of(node)


def walk_up_indices(node: int, parents: Sequence[int]) -> Iterator[int]:
    """The same over node indices: `parents[i]` is the parent of node i, -1 for a root."""
    while node >= 0:
        yield node
        node = parents[node]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Indices from the root down to `node`."""
    return list(walk_up_indices(node, parents))[::-1]


def nodes_on_paths(leaves: Iterable[int], parents: Sequence[int]) -> list[int]:
    """Indices of all nodes on the paths of `leaves`, ascending, once each."""
    seen: set[int] = set()
    for leaf in leaves:
        for node in walk_up_indices(leaf, parents):
            if node in seen:
                break  # the rest of this path was walked before: a shared prefix costs nothing
            seen.add(node)
    return sorted(seen)
