"""The check behind every claim of token exactness: the store against what the engine was fed and
produced."""

from __future__ import annotations

from collections import Counter

import numpy as np

from gyre_megatron.trajectory.paths import walk_up
from gyre_megatron.trajectory.records import Node
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.scripted_engine import ScriptedEngine, logprob_of


def path_to(nodes: dict[int, Node], node_id: int) -> list[Node]:
    """Nodes from the root down to `node_id`."""
    return list(walk_up(nodes[node_id], lambda node: nodes.get(node.parent)))[::-1]


def recorded_calls(
    store: TrajectoryStore, execution_id: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, sampled ids) of every call, rebuilt from the nodes in the store."""
    nodes = {node.node_id: node for node in store.nodes(execution_id)}
    calls = []
    for call in store.calls(execution_id):
        path = path_to(nodes, call.node_id)
        ids = np.concatenate([node.token_ids for node in path])
        cut = len(ids) - len(path[-1].logprobs)
        assert call.num_prompt_tokens == cut
        calls.append((tuple(ids[:cut].tolist()), tuple(ids[cut:].tolist())))
    return calls


def assert_replays(store: TrajectoryStore, execution_id: str, engine: ScriptedEngine) -> None:
    """The calls of the store are those the engine saw, token for token, with its log-probabilities;
    none is missing."""
    seen = Counter(zip(map(tuple, engine.prompts), map(tuple, engine.outputs), strict=True))
    assert Counter(recorded_calls(store, execution_id)) == seen
    starts = {call.node_id: call.num_prompt_tokens for call in store.calls(execution_id)}
    for node in store.nodes(execution_id):
        if node.sampled:
            sampled = node.token_ids[node.num_context :].tolist()
            start = starts[node.node_id]
            assert node.logprobs.tolist() == [
                logprob_of(start + i, t, engine.version) for i, t in enumerate(sampled)
            ]
            assert node.versions == ((engine.version, len(sampled)),)
