"""Admission of a group: who counts, what an edge weighs, what may be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.trajectory.admission import pack_group, trains_without_advantage
from gyre_megatron.trajectory.fit import Reason, TrainingBounds
from gyre_megatron.trajectory.packed_bin import PackedBin
from gyre_megatron.trajectory.processor import ProcessedGroup, process_group
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.trees import TreeBuilder, open_store

GROUPS_PER_STEP = 4
MEAN = ProcessorConfig(advantage="mean")

Fill = Callable[[TreeBuilder], None]


def answer(reward: float | None, status: str = "scored", tokens: int = 5, **call) -> Fill:
    """An execution of one call after ten tokens of prompt."""

    def fill(builder: TreeBuilder) -> None:
        if tokens:
            builder.call(builder.context(None, 8), tokens, **call)
        builder.finish(reward, status)

    return fill


def fill_group(store: TrajectoryStore, executions: list[Fill], group: str = "g") -> None:
    ids = store.add_group(group, {}, len(executions), 3)
    for execution_id, fill in zip(ids, executions, strict=True):
        fill(TreeBuilder(store, execution_id))


def training(budget: int = 256, moe_aux_loss: float = 0.0, **gspo) -> TrainingConfig:
    return TrainingConfig(token_budget=budget, moe_aux_loss=moe_aux_loss, gspo=GspoConfig(**gspo))


def admit(
    store: TrajectoryStore, config: TrainingConfig, version: int = 3
) -> tuple[ProcessedGroup, list[PackedBin]]:
    group = process_group(store, "g", MEAN, TrainingBounds.of(config, version))
    return group, pack_group(group, config, GROUPS_PER_STEP, linear_cost=100)


def weight_by_execution(group: ProcessedGroup, bins: list[PackedBin]) -> dict[str, float]:
    """Sum of the edge weights of each execution, in shares of the group's weight."""
    sums: Counter[str] = Counter()
    for b in bins:
        executions = b.trajectory_executions[b.edge_trajectories]
        for execution, weight in zip(executions, b.edge_weights, strict=True):
            sums[group.trees[execution].execution_id] += float(weight) * GROUPS_PER_STEP
    return dict(sums)


def test_a_placeholder_shares_and_an_excluded_execution_does_not(tmp_path: Path) -> None:
    """4 executions, 2 scored, 1 excluded, 1 placeholder: 3 share 1. The sum used to be 0.5."""
    with open_store(tmp_path) as store:
        fill_group(
            store,
            [
                answer(1.0),
                answer(0.0, tokens=9),
                answer(None, "excluded"),
                answer(0.0, "placeholder", tokens=0),
            ],
        )
        group, bins = admit(store, training())
    assert group.num_counted == 3 and group.rewards == {"g.00": 1.0, "g.01": 0.0, "g.03": 0.0}
    assert [t.advantage for t in group.trees] == pytest.approx([2 / 3, -1 / 3])
    assert weight_by_execution(group, bins) == pytest.approx({"g.00": 1 / 3, "g.01": 1 / 3})


def test_a_group_in_which_nobody_counts_contributes_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill_group(store, [answer(None, "excluded"), answer(None, "dropped")])
        group, bins = admit(store, training())
    assert bins == [] and group.rewards == {} and len(group.excluded) == 2
    assert group.statuses == {"excluded": 1, "dropped": 1}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    statuses=st.lists(
        st.sampled_from(["scored", "scored", "excluded", "dropped", "placeholder", "too long"]),
        min_size=1,
        max_size=6,
    ),
    lengths=st.lists(st.integers(0, 30), min_size=6, max_size=6),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
    denominator=st.sampled_from(["execution", "batch_tokens", "constant"]),
)
def test_every_group_weighs_the_same(
    statuses: list[str], lengths: list[int], rewards: list[float], denominator: str
) -> None:
    fills = []
    for status, length, reward in zip(statuses, lengths, rewards, strict=False):
        if status == "too long":
            fills.append(answer(reward, tokens=100))
        elif status == "scored":
            fills.append(answer(reward, tokens=length))
        else:
            fills.append(answer(0.0 if status == "placeholder" else None, status, 0))
    # With an entropy bonus everybody stays in the bins, so that all weights can be seen.
    config = training(64, denominator=denominator, constant_length=20, entropy_coefficient=0.1)
    with TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        fill_group(store, fills)
        group, bins = admit(store, config)
    total = sum(weight_by_execution(group, bins).values())
    trained = [t.num_trained_tokens for t in group.trees if t.num_trained_tokens]
    assert group.num_counted == len(statuses) - sum(
        status in ("excluded", "dropped", "too long") for status in statuses
    )
    if not trained:
        assert total == 0
    elif denominator == "execution":
        assert total == pytest.approx(len(trained) / group.num_counted, rel=1e-5)
    elif denominator == "batch_tokens":
        assert total == pytest.approx(1.0, rel=1e-5)
    else:
        assert total == pytest.approx(sum(trained) / (20 * group.num_counted), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "contributes"),
    [
        ({}, False),
        ({"proximal": True, "max_log_ratio": 1.0}, False),
        ({"kl_coefficient": 0.1}, True),
        ({"entropy_coefficient": 0.1}, True),
        ({"entropy_coefficient": -0.1}, True),
        ({"moe_aux_loss": 0.01}, True),
    ],
)
def test_executions_without_an_advantage_stay_where_they_contribute(
    tmp_path: Path, changes: dict, contributes: bool
) -> None:
    """A group of 4 with one advantage of 0 under a KL term: its term used to be missing."""
    with open_store(tmp_path) as store:
        fill_group(store, [answer(r) for r in (1.0, 0.5, 0.5, 0.0)])
        config = training(**changes)
        group, bins = admit(store, config)
    assert trains_without_advantage(config) == contributes
    packed = {i for b in bins for i in b.trajectory_executions.tolist()}
    assert packed == ({0, 1, 2, 3} if contributes else {0, 3})
    shares = weight_by_execution(group, bins)
    assert list(shares.values()) == pytest.approx([1 / 4] * len(packed))


def test_a_group_of_equal_rewards_still_trains_its_other_terms(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill_group(store, [answer(1.0), answer(1.0)])
        assert admit(store, training())[1] == []
        _, bins = admit(store, training(kl_coefficient=0.1))
    assert sum(len(b.edge_weights) for b in bins) == 10
    assert {float(a) for b in bins for a in b.trajectory_advantages} == {0.0}


def test_tokens_are_counted_before_executions_leave(tmp_path: Path) -> None:
    """980 of 1,000 edges belong to an execution without an advantage: 0.001 each, not 0.033."""
    rewards_and_tokens = ((1.0, 10), (0.5, 980), (0.0, 10))
    with open_store(tmp_path) as store:
        fill_group(store, [answer(r, tokens=n) for r, n in rewards_and_tokens])
        _, bins = admit(store, training(1024, denominator="batch_tokens"))
    weights = np.concatenate([b.edge_weights for b in bins]) * GROUPS_PER_STEP
    assert len(weights) == 20 and weights == pytest.approx(np.full(20, 0.001))


BROKEN = {
    "a log-probability that is not finite": (
        answer(1.0, logprob=float("nan")),
        Reason.NON_FINITE_LOGPROBS,
        {},
    ),
    "an infinite log-probability": (
        answer(1.0, logprob=float("-inf")),
        Reason.NON_FINITE_LOGPROBS,
        {},
    ),
    "a reward that is not a number": (answer(float("nan")), Reason.NON_FINITE_REWARD, {}),
    "an infinite reward": (answer(float("inf")), Reason.NON_FINITE_REWARD, {}),
    "no reward": (answer(None, "excluded"), Reason.NO_REWARD, {}),
    "greedy sampling": (answer(1.0, temperature=0.0), Reason.GREEDY_SAMPLING, {}),
    "one token too many": (answer(1.0, tokens=61), Reason.TRAJECTORY_TOO_LONG, {"budget": 70}),
    "old weights": (answer(1.0, versions=((1, 5),)), Reason.STALE, {"max_staleness": 1}),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("whole", [False, True])
def test_one_broken_execution_costs_itself_only(tmp_path: Path, name: str, whole: bool) -> None:
    fill, reason, changes = BROKEN[name]
    if whole:
        changes = {**changes, "ratio_level": "execution"}
    with open_store(tmp_path) as store:
        fill_group(store, [answer(1.0, tokens=20), fill, answer(0.5, tokens=20)])
        group, bins = admit(store, training(**changes))
    assert [(e.execution_id, e.problem.reason) for e in group.excluded] == [("g.01", reason)]
    assert "g.01 is excluded from training" in str(group.excluded[0])
    # It is not in the mean (0.75) that the others are compared with, nor among those who share.
    assert [t.advantage for t in group.trees] == pytest.approx([0.25, -0.25])
    assert weight_by_execution(group, bins) == pytest.approx({"g.00": 0.5, "g.02": 0.5})
    assert all(np.isfinite(b.edge_behaviour_logprobs).all() for b in bins)
    assert group.conservation.trained == 40


def test_a_trajectory_of_exactly_the_budget_fits(tmp_path: Path) -> None:
    """A store whose longest trajectory is 71 tokens used to end the run at a budget of 70."""
    with open_store(tmp_path) as store:
        fill_group(store, [answer(1.0, tokens=60), answer(0.0, tokens=61)])
        group, _ = admit(store, training(70))
        assert [e.execution_id for e in group.excluded] == ["g.01"]
        assert "71 tokens but training.token_budget is 70" in group.excluded[0].problem.detail
        group, bins = admit(store, training(71))
    assert group.excluded == [] and len(bins) == 2


def test_an_execution_that_must_stay_whole_and_cannot(tmp_path: Path) -> None:
    def branching(builder: TreeBuilder) -> None:
        root = builder.context(None, 8)
        for _ in range(2):
            builder.call(root, 30)
        builder.finish(1.0)

    with open_store(tmp_path) as store:
        fill_group(store, [branching, answer(0.0), answer(0.5)])
        group, bins = admit(store, training(64))
        assert group.excluded == [] and bins
        group, bins = admit(store, training(64, ratio_level="execution"))
    (excluded,) = group.excluded
    assert excluded.problem.reason == Reason.EXECUTION_TOO_LARGE
    assert "72 unique tokens" in excluded.problem.detail
    assert weight_by_execution(group, bins) == pytest.approx({"g.01": 0.5, "g.02": 0.5})


def test_tokens_too_old_to_train_are_in_no_denominator(tmp_path: Path) -> None:
    """Of 10 tokens 4 are too old: the 6 others share the execution's weight."""
    with open_store(tmp_path) as store:
        fill_group(store, [answer(1.0, tokens=10, versions=((2, 4), (4, 6))), answer(0.0)])
        group, bins = admit(store, training(max_staleness=1), version=4)
    fresh = np.concatenate([b.edge_weights[b.edge_versions == 4] for b in bins])
    assert {v for b in bins for v in b.edge_versions.tolist()} == {3, 4}
    assert fresh * GROUPS_PER_STEP == pytest.approx(np.full(6, 0.5 / 6))
    assert group.conservation.trained == 6 + 5 and group.conservation.dropped == 4


def test_old_branches_are_not_drawn(tmp_path: Path) -> None:
    def branching(builder: TreeBuilder) -> None:
        root = builder.context(None, 8)
        builder.call(root, 50, versions=((0, 50),))
        builder.call(root, 5)
        builder.finish(1.0)

    with open_store(tmp_path) as store:
        fill_group(store, [branching])
        group, _ = admit(store, training(max_staleness=0))
    assert [len(t.trajectories) for t in group.trees] == [1]
    assert group.trees[0].num_trained_tokens == 5
