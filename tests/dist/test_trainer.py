"""The trainer's promises beyond gradients: isolation, bins, options, steps, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.training import GspoConfig, OptimizerConfig, TrainingConfig
from gyre_megatron.trajectory.packing import PackedBin, pack
from tests.dist.gradients import canonical_gradients, edge_logprobs, make_trainer, run_batches
from tests.dist.tiny import VOCAB, make_checkpoint
from tests.unit.random_trees import random_tree

WIDE = GspoConfig(eps_low=0.9, eps_high=9.0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainer")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


def some_bins(count: int = 8, budget: int = 1024, first: int = 500) -> list[PackedBin]:
    return pack([random_tree(first + i, vocab=VOCAB, max_children=3) for i in range(count)], budget, count)


def assert_close(actual, expected, tolerance: float = 1e-5) -> None:
    scale = torch.cat([v.flatten() for v in expected.values()]).norm()
    for name, e in expected.items():
        assert float((actual[name] - e).norm()) < tolerance * max(float(e.norm()), 1e-4 * float(scale)), name


# Isolation


def perturbed(bin_: PackedBin, node: int) -> PackedBin:
    """Other tokens in one node, everything else as it was."""
    token_ids = bin_.token_ids.copy()
    start, end = bin_.node_starts[node], bin_.node_ends[node]
    token_ids[start:end] = (token_ids[start:end] + 1) % VOCAB
    return dataclasses.replace(bin_, token_ids=token_ids)


def score_bins(checkpoint: Path, config: TrainingConfig, bins: list[PackedBin]):
    trainer = make_trainer(checkpoint, config)
    return [edge_logprobs(trainer, [b])[0] for b in bins]


@pytest.mark.parametrize("kind", ["dense", "moe", "hybrid"])
@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["single", "cp2"])
def test_a_sibling_changes_nothing(kind: str, layout: dict, ranks, checkpoints) -> None:
    """Bit-equal log-probabilities outside the perturbed node's own subtree.

    Experts work on whatever tokens were sent to them, and the shape of a matrix product changes its
    rounding: with experts, routes are recorded and replayed so that the shapes stay.
    """
    (bin_,) = some_bins(4)
    if kind != "dense":
        routes = np.stack([np.arange(bin_.num_tokens) % 4, (np.arange(bin_.num_tokens) + 1) % 4], -1)
        bin_ = dataclasses.replace(bin_, routed_experts=np.repeat(routes[:, None], 4, 1).astype(np.int16))
    nodes = [n for n in range(1, len(bin_.node_starts)) if bin_.subtree_ends[n] < bin_.num_tokens][:6]
    config = TrainingConfig(token_budget=1024, router_replay=kind != "dense", **layout)
    results = ranks(layout.get("cp", 1)).run(
        score_bins, checkpoints(kind), config, [bin_, *(perturbed(bin_, n) for n in nodes)]
    )[0]
    for n, changed in zip(nodes, results[1:], strict=True):
        inside = (bin_.edge_sources >= bin_.node_starts[n]) & (bin_.edge_sources < bin_.subtree_ends[n])
        assert np.array_equal(changed[~inside], results[0][~inside])
        assert not inside.any() or not np.array_equal(changed[inside], results[0][inside])


# Bins and ranks


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_result_does_not_depend_on_bins_or_micro_steps(kind: str, ranks, checkpoints) -> None:
    config = TrainingConfig(token_budget=1024, gspo=WIDE)
    wide, narrow = some_bins(budget=4096), some_bins(budget=160)
    assert len(narrow) >= 3 * len(wide)
    run = lambda size, bins, split: ranks(size).run(run_batches, checkpoints(kind), config, [bins], split)[0][0]  # noqa: E731
    expected = run(1, wide, 1)
    for size, bins, split in ((1, narrow, 1), (1, narrow, 3), (2, narrow, 1), (2, wide, 1)):
        sums, _, grads = run(size, bins, split)
        assert sums["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
        assert sums["num_edges"] == expected[0]["num_edges"]
        assert_close(grads, expected[2])


def on_policy_ratios(checkpoint: Path, config: TrainingConfig, bins: list[PackedBin]):
    """Sums when the behaviour log-probabilities are the trainer's own, at each token's own
    temperature."""
    trainer = make_trainer(checkpoint, config)
    logprobs = edge_logprobs(trainer, bins)
    bins = [dataclasses.replace(b, edge_behaviour_logprobs=lp) for b, lp in zip(bins, logprobs, strict=True)]
    trainer.begin_batch(3)
    return trainer.micro_step(bins)


def test_on_policy_ratio_is_one_at_any_temperature(ranks, checkpoints) -> None:
    """TRL#4159, miles#1345: scored at the temperature it was sampled at, an unchanged policy has
    ratio 1."""
    bins = some_bins()
    assert len({*bins[0].edge_temperatures.tolist()}) > 1
    sums = ranks(1).run(on_policy_ratios, checkpoints("dense"), TrainingConfig(), bins)[0]
    assert sums["ratio_sum"] == pytest.approx(sums["num_edges"], rel=1e-6)
    assert sums["logprob_gap_sum"] == pytest.approx(0, abs=1e-4) and sums["num_clipped"] == 0
    roles = ("main", "main_summary", "sub_agent", "sub_agent_summary")
    assert sum(sums[f"num_edges/{r}"] for r in roles) == sums["num_edges"]
    assert all(sums[f"logit_gradient_square/{r}"] > 0 for r in roles)


# Options that run through the model


def with_routes(bins: list[PackedBin], layers: int = 4) -> list[PackedBin]:
    rng = np.random.default_rng(0)
    out = []
    for b in bins:
        routes = np.stack([rng.permuted(np.arange(4))[:2] for _ in range(b.num_tokens * layers)])
        routes = routes.reshape(b.num_tokens, layers, 2).astype(np.int16)
        routes[rng.random(b.num_tokens) < 0.3] = -1
        out.append(dataclasses.replace(b, routed_experts=routes))
    return out


REPLAY_LAYOUTS = [dict(tp=2), dict(pp=2, recompute="full"), dict(cp=2), dict(ep=2, etp=1)]


@pytest.mark.parametrize("layout", REPLAY_LAYOUTS, ids=["tp2", "pp2_recompute", "cp2", "ep2"])
def test_router_replay(layout: dict, ranks, checkpoints) -> None:
    """Recorded routes are taken, change the result, agree over layouts, and missing ones fall back
    to the router."""
    bins = some_bins(budget=300)
    replayed = with_routes(bins)
    config = TrainingConfig(token_budget=1024, gspo=WIDE, router_replay=True)
    run = lambda size, config, bins: ranks(size).run(run_batches, checkpoints("moe"), config, [bins])[0][0]  # noqa: E731
    own, expected = run(1, config, bins), run(1, config, replayed)
    assert abs(own[0]["loss"] - expected[0]["loss"]) > 1e-4
    ignored = run(1, config.model_copy(update={"router_replay": False}), replayed)
    assert ignored[0]["loss"] == pytest.approx(own[0]["loss"], rel=1e-6)
    unknown = [dataclasses.replace(b, routed_experts=np.full_like(b.routed_experts, -1)) for b in replayed]
    assert run(1, config, unknown)[0]["loss"] == pytest.approx(own[0]["loss"], rel=1e-6)
    sums, _, grads = run(2, TrainingConfig(token_budget=1024, gspo=WIDE, router_replay=True, **layout), replayed)
    assert sums["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert_close(grads, expected[2])


AUX_LAYOUTS = [dict(tp=2), dict(cp=2), dict(ep=2, etp=1), dict(pp=2)]


@pytest.mark.parametrize("layout", AUX_LAYOUTS, ids=["tp2", "cp2", "ep2", "pp2"])
def test_balancing_loss_counts_unique_tokens(layout: dict, ranks, checkpoints) -> None:
    """The balancing loss moves the router, and its gradient is the same in every layout (padding
    does not count)."""
    bins = some_bins(budget=300)
    run = lambda size, **kw: ranks(size).run(  # noqa: E731
        run_batches, checkpoints("moe"), TrainingConfig(token_budget=1024, gspo=WIDE, **kw), [bins]
    )[0][0]
    without, expected = run(1), run(1, moe_aux_loss=0.5)
    gate = "model.layers.0.mlp.gate.weight"
    assert float((without[2][gate] - expected[2][gate]).norm()) > 1e-3 * float(without[2][gate].norm())
    assert_close(run(2, moe_aux_loss=0.5, **layout)[2], expected[2])


def kl_run(checkpoint: Path, config: TrainingConfig, bins: list[PackedBin]):
    trainer = make_trainer(checkpoint, config, with_optimizer=True)
    first = train_once(trainer, bins)
    second = train_once(trainer, bins)
    return first, second


def train_once(trainer, bins: list[PackedBin]) -> dict[str, float]:
    trainer.begin_batch(3)
    sums = trainer.micro_step(bins)
    trainer.finish_gradients()
    return sums | trainer.optimizer_step()


def test_kl_to_the_reference_grows_from_zero(ranks, checkpoints) -> None:
    gspo = GspoConfig(eps_low=0.9, eps_high=9.0, kl_coefficient=0.1)
    config = TrainingConfig(gspo=gspo, optimizer=OptimizerConfig(lr=1e-2))
    first, second = ranks(1).run(kl_run, checkpoints("dense"), config, some_bins())[0]
    assert first["kl_reference_sum"] == pytest.approx(0, abs=1e-4)
    assert second["kl_reference_sum"] > 1


# Steps and checkpoints

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=0.05)


def steps(checkpoint: Path, config: TrainingConfig, bins, num_steps: int, save=None, load=None):
    """(norms and rates of the steps, weights on rank 0)."""
    trainer = make_trainer(checkpoint, config, with_optimizer=True)
    if load:
        trainer.load_checkpoint(load)
    results = [train_once(trainer, bins) for _ in range(num_steps)]
    if save:
        if dist.get_rank() == 0:
            Path(save).mkdir(parents=True)
        dist.barrier()
        trainer.save_checkpoint(save)
    scores = trainer.score([list(range(40))], 0.9)[0]
    return [(r["loss"], r["grad_norm"], r["lr"]) for r in results], scores


STEP_LAYOUTS = [
    ("dense", dict(tp=2)),
    ("moe", dict(ep=2, etp=1)),
    ("moe", dict(pp=2)),
    ("hybrid", dict(tp=2)),
    ("hybrid", dict(cp=2)),
    ("moe", {}),
]


STEP_IDS = ["tp2", "ep2", "pp2", "hybrid_tp2", "hybrid_cp2", "dp2_distributed"]


@pytest.mark.parametrize(("kind", "layout"), STEP_LAYOUTS, ids=STEP_IDS)
def test_three_steps_equal_one_rank(kind: str, layout: dict, ranks, checkpoints) -> None:
    """Clipping, Adam and weight decay give the same weights in every layout."""
    bins = some_bins(budget=300)
    one = TrainingConfig(token_budget=1024, gspo=WIDE, optimizer=OPTIMIZER)
    optimizer = OPTIMIZER.model_copy(update={"distributed": not layout})
    many = TrainingConfig(token_budget=1024, gspo=WIDE, optimizer=optimizer, **layout)
    expected, scores = ranks(1).run(steps, checkpoints(kind), one, bins, 3)[0]
    actual, other = ranks(2).run(steps, checkpoints(kind), many, bins, 3)[0]
    assert expected[0][1] > OPTIMIZER.clip_grad  # clipping is at work
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    np.testing.assert_allclose(other, scores, atol=2e-4)


CHECKPOINT_CASES = [
    ("dense", 1, {}, 1, {}),
    ("dense", 2, dict(tp=2), 2, dict(pp=2)),
    ("moe", 2, dict(ep=2, etp=1), 2, dict(ep=2, etp=1)),
    ("moe", 1, {}, 2, dict(tp=2)),
]


@pytest.mark.parametrize("case", CHECKPOINT_CASES, ids=["same", "tp2_to_pp2", "ep2", "one_to_tp2"])
def test_checkpoint_continues_the_run(case, ranks, checkpoints, tmp_path) -> None:
    """Two steps, save, load in another layout, two more: as four steps in one go; the model's state
    is complete."""
    kind, size, layout, other_size, other = case
    bins = some_bins(4)
    config = lambda layout: TrainingConfig(token_budget=1024, gspo=WIDE, optimizer=OPTIMIZER, **layout)  # noqa: E731
    straight, scores = ranks(1).run(steps, checkpoints(kind), config({}), bins, 4)[0]
    save = str(tmp_path / "step2")
    ranks(size).run(steps, checkpoints(kind), config(layout), bins, 2, save)
    resumed, resumed_scores = ranks(other_size).run(steps, checkpoints(kind), config(other), bins, 2, None, save)[0]
    np.testing.assert_allclose(resumed, straight[2:], rtol=1e-4)
    np.testing.assert_allclose(resumed_scores, scores, atol=2e-4)


def test_a_missing_checkpoint_is_named(ranks, checkpoints, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="holds no complete Megatron checkpoint"):
        ranks(1).run(steps, checkpoints("dense"), TrainingConfig(), [], 0, None, str(tmp_path))


def buffers_round_trip(checkpoint: Path, config: TrainingConfig, bins: list[PackedBin]):
    """Gradients of a second trainer added through buffers; weights written through buffers."""
    core = make_trainer(checkpoint, config, with_optimizer=True)
    for bins_of_cell in (bins[::2], bins[1::2]):  # two cells' work, one after the other, reduced by hand
        core.begin_batch(3)
        core.micro_step(bins_of_cell)
        core.finish_gradients()
        if bins_of_cell is bins[0] or "kept" not in locals():
            kept = [b.clone() for b in core.gradient_buffers()]
    for buffer, other in zip(core.gradient_buffers(), kept, strict=True):
        buffer.add_(other)
    grads = canonical_gradients(core)
    before = core.score([list(range(30))])[0]
    saved = [b.clone() for b in core.parameter_buffers()]
    for buffer in core.parameter_buffers():
        buffer.zero_()
    zeroed = core.score([list(range(30))])[0]
    for buffer, value in zip(core.parameter_buffers(), saved, strict=True):
        buffer.copy_(value)
    return grads, before, zeroed, core.score([list(range(30))])[0]


@pytest.mark.parametrize("distributed", [False, True])
def test_buffers_carry_gradients_and_weights(distributed: bool, ranks, checkpoints) -> None:
    bins = some_bins(budget=160)
    optimizer = OPTIMIZER.model_copy(update={"distributed": distributed})
    config = TrainingConfig(token_budget=1024, gspo=WIDE, optimizer=optimizer)
    grads, before, zeroed, after = ranks(1).run(buffers_round_trip, checkpoints("moe"), config, bins)[0]
    expected = ranks(1).run(run_batches, checkpoints("moe"), config, [bins])[0][0][2]
    assert_close(grads, expected)
    assert np.array_equal(before, after)
    assert np.allclose(zeroed, -np.log(VOCAB), atol=1e-5)


# Bad layouts


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (dict(tp=3), "does not divide it"),
        (dict(pp=2, vpp=3), "does not divide the model's 4 layers"),
        (dict(tp=2, sequence_parallel=False), "sequence_parallel"),
        (dict(ep=2, etp=2), "does not divide the 2 ranks of a pipeline stage"),
    ],
)
def test_bad_layouts_name_the_knob(layout: dict, message: str, ranks, checkpoints) -> None:
    with pytest.raises(RuntimeError, match=message):
        ranks(2).run(steps, checkpoints("moe"), TrainingConfig(**layout), [], 0)
