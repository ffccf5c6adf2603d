"""The processor: advantages, bounded sampling, masking, and the conservation of tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.branches import Conservation
from gyre_megatron.trajectory.processor import process_group
from gyre_megatron.trajectory.sampling import select_branches
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.trees import TreeBuilder, open_store

PRIORITY = ProcessorConfig().role_priority


def one_execution(store: TrajectoryStore, group: str = "g") -> TreeBuilder:
    return TreeBuilder(store, store.add_group(group, {}, 1, 0)[0])


def test_a_prefix_trains_once_and_every_token_is_accounted_for(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = one_execution(store)
    root = builder.context(None, 10)
    first = builder.call(root, 4)
    main = builder.call(builder.context(first, 5), 6)
    summary = builder.call(builder.context(first, 7), 8, role="main_summary")
    builder.call(builder.context(None, 20), 3, role="auxiliary")
    builder.finish(1.0)
    group = process_group(store, "g", ProcessorConfig())
    tree = group.trees[0]
    assert [t.role for t in tree.trajectories] == ["main", "main_summary"]
    assert tree.num_trained_tokens == 4 + 6 + 8
    owned = {tuple(n.token_ids.tolist()): tree.owner[i] for i, n in enumerate(tree.nodes)}
    assert owned[tuple(first.token_ids.tolist())] == owned[tuple(main.token_ids.tolist())] == 0
    assert owned[tuple(summary.token_ids.tolist())] == 1
    # Branches flattened: root + first (16) with main (5 + 8) and summary (7 + 10); the auxiliary
    # call: 20 + 5.
    captured = (16 + 13) + (16 + 17) + 25
    assert group.conservation == Conservation(
        captured, trained=18, shared=16, context=12 + 7 + 9, dropped=25
    )
    store.close()


def test_columns_of_a_tree_node(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = one_execution(store)
    builder.call(builder.context(None, 3), 2)
    builder.finish(1.0)
    node = process_group(store, "g", ProcessorConfig()).trees[0].nodes[1]
    assert node.trainable.tolist() == [False, False, True, True]
    assert node.behaviour_logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert node.weight_versions.tolist() == [-1, -1, 3, 3]
    assert node.temperatures.tolist() == [1.0, 1.0, 0.75, 0.75]
    store.close()


@pytest.mark.parametrize(("state", "role"), [("undelivered", "main"), ("complete", "auxiliary")])
def test_a_branch_outlives_what_was_cut_off_below_it(tmp_path: Path, state: str, role: str) -> None:
    store = open_store(tmp_path)
    builder = one_execution(store)
    first = builder.call(builder.context(None, 10), 4)
    builder.call(
        builder.context(first, 5), 6, role=role, state=state
    )  # in flight when the harness was ended
    builder.finish(1.0)
    group = process_group(store, "g", ProcessorConfig())
    tree = group.trees[0]
    assert [t.role for t in tree.trajectories] == ["main"] and tree.num_trained_tokens == 4
    assert group.conservation == Conservation(29, trained=4, shared=0, context=12, dropped=13)
    store.close()


@pytest.mark.parametrize("state", ["undelivered", "superseded"])
def test_what_the_harness_never_used_is_not_trained(tmp_path: Path, state: str) -> None:
    store = open_store(tmp_path)
    builder = one_execution(store)
    root = builder.context(None, 10)
    builder.call(root, 50, state=state)
    builder.call(root, 4)
    builder.finish(1.0)
    group = process_group(store, "g", ProcessorConfig())
    assert group.trees[0].num_trained_tokens == 4
    assert group.conservation.dropped == 52 and group.conservation.shared == 10
    store.close()


def test_truncated_answers_train_only_if_wanted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = one_execution(store)
    cut = builder.call(builder.context(None, 10), 50, finish="length")
    builder.call(builder.context(cut, 3), 4)
    builder.finish(1.0)
    assert process_group(store, "g", ProcessorConfig()).trees[0].num_trained_tokens == 54
    group = process_group(store, "g", ProcessorConfig(train_truncated=False))
    assert group.trees[0].num_trained_tokens == 4
    assert [n.trainable.sum() for n in group.trees[0].nodes] == [0, 0, 0, 4]
    store.close()


def test_scoring_states(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    endings = [
        (1.0, "scored"),
        (0.0, "scored"),
        (None, "excluded"),
        (0.0, "placeholder"),
        (None, "dropped"),
    ]
    for execution_id, (reward, status) in zip(store.add_group("g", {}, 5, 0), endings, strict=True):
        builder = TreeBuilder(store, execution_id)
        builder.call(builder.context(None, 3), 2)
        builder.finish(reward, status)
    group = process_group(store, "g", ProcessorConfig(advantage="mean"))
    # Excluded and dropped executions do not count in the mean; the placeholder does, with reward 0
    # and no tokens.
    assert [t.advantage for t in group.trees] == pytest.approx([2 / 3, -1 / 3])
    assert len(group.excluded) == 2 and group.num_counted == 3
    assert group.conservation.trained == 4 and group.conservation.dropped == 3 * 7
    store.close()


def test_an_unfinished_group_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add_group("g", {}, 2, 0)
    with pytest.raises(TrajectoryError, match="have not finished"):
        process_group(store, "g", ProcessorConfig())
    store.close()


def test_roles_are_drawn_in_order_of_priority() -> None:
    parents, counts = [-1, 0, 0, 0, 0, 0], np.asarray([0, 1, 100, 100, 100, 100])
    roles = ["main", "sub_agent_summary", "sub_agent", "main_summary", "auxiliary"]
    chosen, owner = select_branches(
        parents, counts, [1, 2, 3, 4, 5], roles, PRIORITY, 5, np.random.default_rng(0)
    )
    assert [roles[i] for i in chosen] == ["main", "main_summary", "sub_agent", "sub_agent_summary"]
    assert owner.tolist() == [-1, 0, 3, 2, 1, -1]


def test_leaves_are_drawn_in_proportion_to_their_unmasked_tokens() -> None:
    parents, counts = [-1, 0, 0, 0], np.asarray([0, 10, 30, 60])
    rng, draws = np.random.default_rng(1), Counter[int]()
    for _ in range(4000):
        chosen, _ = select_branches(parents, counts, [1, 2, 3], ["main"] * 3, PRIORITY, 1, rng)
        draws[chosen[0]] += 1
    assert [draws[i] / 4000 for i in range(3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.03)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], np.ndarray]:
    size = draw(st.integers(1, 25))
    parents = [draw(st.integers(-1, index - 1)) for index in range(size)]
    return parents, np.asarray(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(forest=forests(), max_branches=st.integers(1, 5), seed=st.integers(0, 99))
def test_selection_is_bounded_and_owns_each_token_once(
    forest: tuple, max_branches: int, seed: int
) -> None:
    parents, counts = forest
    leaves = [i for i in range(len(parents)) if i not in parents]
    rng = np.random.default_rng(seed)
    roles = [PRIORITY[int(rng.integers(4))] for _ in leaves]
    chosen, owner = select_branches(parents, counts, leaves, roles, PRIORITY, max_branches, rng)
    assert len(chosen) <= max_branches and len(set(chosen)) == len(chosen)
    on_path: set[int] = set()
    for place, index in enumerate(chosen):
        node, new = leaves[index], 0
        while node >= 0:
            if node not in on_path and counts[node]:
                assert owner[node] == place
                new += counts[node]
            on_path.add(node)
            node = parents[node]
        assert new > 0, "a branch without a token of its own was chosen"
    assert all(
        owner[node] == -1 for node in range(len(parents)) if node not in on_path or not counts[node]
    )
    left = [i for i in range(len(leaves)) if i not in chosen and counts[leaves[i]] > 0]
    assert len(chosen) == max_branches or not left


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_tokens_are_conserved_in_any_tree(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = open_store(tmp_path_factory.mktemp("store"))
    builder = one_execution(store)
    nodes = [builder.context(None, 3)]
    for _ in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([None, *nodes]))
        context = builder.context(parent, data.draw(st.integers(1, 4)))
        role = data.draw(st.sampled_from([*PRIORITY, "auxiliary"]))
        state = data.draw(st.sampled_from(["complete", "complete", "undelivered", "superseded"]))
        answer = builder.call(context, data.draw(st.integers(0, 5)), role, state)
        nodes += [context, answer] if state == "complete" else [context]
    builder.finish(1.0)
    config = ProcessorConfig(max_trajectories=data.draw(st.integers(1, 4)))
    group = process_group(store, "g", config)
    tree = group.trees[0]
    assert group.conservation.trained == tree.num_trained_tokens
    assert group.conservation.captured == sum(
        len(builder_path(store, builder, leaf)) for leaf in leaf_ids(store, builder)
    )
    assert len(tree.trajectories) <= config.max_trajectories
    store.close()


def leaf_ids(store: TrajectoryStore, builder: TreeBuilder) -> list[int]:
    nodes = store.nodes(builder.execution_id)
    return [n.node_id for n in nodes if n.node_id not in {m.parent for m in nodes}]


def builder_path(store: TrajectoryStore, builder: TreeBuilder, leaf: int) -> list[int]:
    nodes, ids = {n.node_id: n for n in store.nodes(builder.execution_id)}, []
    while leaf in nodes:
        ids += nodes[leaf].token_ids.tolist()
        leaf = nodes[leaf].parent
    return ids
