"""The tree of one running execution, in memory: where a call attaches, and which token ids it is
fed.

Fed by the proxy, rebuilt from the store when needed. Invariant: the ids of a path are those of its
nodes laid end to end; a node never changes once it has a child or is stored. Nothing here recurses:
depth is unbounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_megatron.trajectory.paths import walk_up
from gyre_megatron.trajectory.records import NO_PARENT, Call, Node

_EMPTY_F32 = np.empty(0, np.float32)


@dataclass(frozen=True)
class Match:
    """How far a prompt follows paths that exist: `node` (None: nowhere) covers the first
    `num_units` units."""

    node: Node | None
    num_units: int


class Forest:
    """Nodes of one attempt, indexed by (parent, key) and by the call that sampled them."""

    def __init__(
        self, new_node_id: Callable[[], int], nodes: Iterable[Node] = (), calls: Iterable[Call] = ()
    ) -> None:
        self._new_node_id = new_node_id
        self._nodes: dict[int, Node] = {}
        self._children: dict[tuple[int, bytes], Node] = {}
        self._by_call: dict[str, Node] = {}
        self._num_children: dict[int, int] = {}
        self.num_tokens = 0
        delivered = {call.call_id for call in calls if call.state == "complete"}
        for node in nodes:
            self._insert(node, matchable=not node.sampled or node.call_id in delivered)

    def __len__(self) -> int:
        return len(self._nodes)

    def child(self, parent: Node | None, key: bytes) -> Node | None:
        """The child of `parent` (None: a root) with that key; the latest if there were several."""
        return self._children.get((_id(parent), key))

    def sampled_by(self, call_id: str) -> Node | None:
        """The node an answered call produced."""
        return self._by_call.get(call_id)

    def parent(self, node: Node) -> Node | None:
        """The node above, None for a root."""
        return self._nodes.get(node.parent)

    def has_children(self, node: Node) -> bool:
        """Whether anything hangs under the node."""
        return self._num_children.get(node.node_id, 0) > 0

    def match(self, units: Sequence[tuple[bytes, Sequence[str]]]) -> Match:
        """Follow units, given as (key, ids of calls they name), from the roots as far as paths
        exist."""
        node: Node | None = None
        for index, (key, provenance) in enumerate(units):
            following = self._step(node, key, provenance)
            if following is None:
                return Match(node, index)
            node = following
        return Match(node, len(units))

    def _step(self, node: Node | None, key: bytes, provenance: Sequence[str]) -> Node | None:
        for call_id in provenance:
            named = self._by_call.get(call_id)
            if named is not None and named.parent == _id(node):
                return named
        return self._children.get((_id(node), key))

    def add_context(self, parent: Node | None, key: bytes, token_ids: np.ndarray) -> Node:
        """Hang rendered tokens (int32 [n]) under `parent`."""
        node = Node(
            node_id=self._new_node_id(),
            parent=_id(parent),
            key=key,
            token_ids=token_ids,
            num_context=len(token_ids),
            logprobs=_EMPTY_F32,
            start=parent.end if parent else 0,
        )
        self._insert(node, matchable=True)
        return node

    def add_sampled(self, node: Node) -> None:
        """Hang an answered call; from now on the next prompt can follow it."""
        self._insert(node, matchable=True)

    def forget_answer(self, node: Node) -> None:
        """The harness never saw this answer: no prompt may follow it."""
        if self._children.get((node.parent, node.key)) is node:
            del self._children[(node.parent, node.key)]
        self._by_call.pop(node.call_id, None)

    def siblings_sampled_from(self, parent: Node, other_than: Node) -> list[Node]:
        """Childless answers to the same prompt, apart from `other_than`."""
        nodes = self._by_call.values()
        return [
            n
            for n in nodes
            if n.parent == parent.node_id and n is not other_than and not self.has_children(n)
        ]

    def path(self, node: Node | None) -> list[Node]:
        """Nodes from the root down to `node`."""
        return list(walk_up(node, self.parent))[::-1]

    def path_ids(self, node: Node | None) -> np.ndarray:
        """Token ids, int32, from the root down to the end of `node`."""
        return np.concatenate([np.empty(0, np.int32), *(n.token_ids for n in self.path(node))])

    def unsaved(self, node: Node) -> list[Node]:
        """Nodes on the path of `node` that the store does not have yet, parents first."""
        new = itertools.takewhile(lambda n: not n.persisted, walk_up(node, self.parent))
        return list(new)[::-1]

    def _insert(self, node: Node, matchable: bool) -> None:
        self._nodes[node.node_id] = node
        self._num_children[node.parent] = self._num_children.get(node.parent, 0) + 1
        self.num_tokens += len(node.token_ids)
        if matchable:
            self._children[(node.parent, node.key)] = node
            if node.sampled:
                self._by_call[node.call_id] = node


def _id(node: Node | None) -> int:
    return NO_PARENT if node is None else node.node_id
