"""The objective against hand-computed cases, an independent float64 form, and the loss faults known
from elsewhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gyre_megatron.algos.gspo import gspo_loss
from gyre_megatron.algos.objective import EdgeBatch
from gyre_megatron.config.training import GspoConfig
from gyre_megatron.errors import TrajectoryError


def make_batch(
    behaviour, trajectories, advantages, *, weights=None, versions=None, executions=None
) -> EdgeBatch:
    n = len(behaviour)
    return EdgeBatch(
        weights=torch.full((n,), 1.0 / n) if weights is None else torch.tensor(weights),
        behaviour_logprobs=torch.tensor(behaviour),
        versions=torch.tensor([0] * n if versions is None else versions),
        trajectories=torch.tensor(trajectories),
        advantages=torch.tensor(advantages),
        executions=torch.tensor(list(range(len(advantages))) if executions is None else executions),
    )


def run(logprobs, batch, config, **kwargs):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    result = gspo_loss(logprobs, torch.zeros(len(logprobs)), batch, config, **kwargs)
    result.loss.backward()
    return result, logprobs.grad


class TestByHand:
    """Two tokens, log-ratios 0.1 and 0.3: s = exp(0.2) = 1.2214."""

    batch = staticmethod(lambda advantage: make_batch([-1.1, -1.3], [0, 0], [advantage]))
    logprobs = (-1.0, -1.0)

    def test_unclipped(self):
        result, grad = run(self.logprobs, self.batch(1.0), GspoConfig(eps_low=0.5, eps_high=0.5))
        assert result.loss.item() == pytest.approx(-math.exp(0.2), rel=1e-6)
        assert grad.tolist() == pytest.approx([-0.5 * math.exp(0.2)] * 2, rel=1e-6)
        assert not result.clipped.any()

    def test_clipped_above_takes_no_gradient(self):
        result, grad = run(self.logprobs, self.batch(1.0), GspoConfig(eps_low=0.1, eps_high=0.1))
        assert result.loss.item() == pytest.approx(-1.1, rel=1e-6)
        assert grad.tolist() == [0.0, 0.0]
        assert result.clipped.all()

    def test_a_bad_trajectory_is_not_clipped_above(self):
        result, grad = run(self.logprobs, self.batch(-1.0), GspoConfig(eps_low=0.1, eps_high=0.1))
        assert result.loss.item() == pytest.approx(math.exp(0.2), rel=1e-6)
        assert grad.tolist() == pytest.approx([0.5 * math.exp(0.2)] * 2, rel=1e-6)

    def test_a_bad_trajectory_is_clipped_below(self):
        batch = make_batch([-0.9, -0.7], [0, 0], [-1.0])
        result, grad = run(self.logprobs, batch, GspoConfig(eps_low=0.1, eps_high=0.1))
        assert result.loss.item() == pytest.approx(0.9, rel=1e-6)
        assert grad.tolist() == [0.0, 0.0]

    def test_token_level_is_grpo(self):
        config = GspoConfig(eps_low=0.5, eps_high=0.2, ratio_level="token")
        result, grad = run(self.logprobs, self.batch(1.0), config)
        assert result.loss.item() == pytest.approx(-0.5 * (math.exp(0.1) + 1.2), rel=1e-6)
        assert grad.tolist() == pytest.approx([-0.5 * math.exp(0.1), 0.0], rel=1e-6)

    def test_proximal_with_truncated_correction(self):
        config = GspoConfig(eps_low=0.1, eps_high=0.1, proximal=True, importance_cap=1.2)
        result, grad = run(self.logprobs, self.batch(2.0), config)
        weights = [math.exp(0.1), 1.2]  # the second, exp(0.3), is cut
        assert result.loss.item() == pytest.approx(-0.5 * 2 * sum(weights), rel=1e-6)
        assert grad.tolist() == pytest.approx([-0.5 * 2 * w for w in weights], rel=1e-6)

    def test_execution_level_shares_one_ratio(self):
        batch = make_batch([-1.1, -1.3, -1.0], [0, 0, 1], [1.0, 1.0], executions=[7, 7])
        config = GspoConfig(eps_low=0.9, eps_high=9.0, ratio_level="execution")
        result, _ = run((-1.0, -1.0, -1.0), batch, config)
        assert result.ratios.tolist() == pytest.approx([math.exp(0.4 / 3)] * 3, rel=1e-6)

    def test_kl_to_the_reference(self):
        config = GspoConfig(eps_low=0.9, eps_high=9.0, kl_coefficient=0.5)
        result, grad = run(
            self.logprobs, self.batch(0.0), config, reference_logprobs=torch.tensor([-1.5, -1.0])
        )
        k3 = math.exp(-0.5) - 1 + 0.5
        assert result.loss.item() == pytest.approx(0.5 * 0.5 * k3, rel=1e-6)
        assert grad.tolist() == pytest.approx([0.5 * 0.5 * (1 - math.exp(-0.5)), 0.0], abs=1e-7)


def independent_loss(
    logprobs, entropies, reference, old, batch: EdgeBatch, config: GspoConfig, version: int
):
    """The objective written a second time: float64, one trajectory at a time, true gradient through
    the ratio."""
    rows = range(len(logprobs))
    behaviour = batch.behaviour_logprobs.double()
    trained = [
        e
        for e in rows
        if config.max_staleness is None or version - batch.versions[e] <= config.max_staleness
    ]
    if config.max_log_ratio is not None:
        near = []
        for j in range(len(batch.advantages)):
            mine = [e for e in trained if batch.trajectories[e] == j]
            if (
                mine
                and abs(sum(float(logprobs[e].detach() - behaviour[e]) for e in mine) / len(mine))
                <= config.max_log_ratio
            ):
                near += mine
        trained = sorted(near)
    total = torch.zeros((), dtype=torch.float64)

    def shares_ratio(e: int) -> list[int]:
        if config.ratio_level == "token":
            return [e]
        key = (lambda i: batch.trajectories[i]) if config.ratio_level == "trajectory" else execution
        return [i for i in trained if key(i) == key(e)]

    def execution(i: int):
        return batch.executions[batch.trajectories[i]]

    for e in trained:
        group = shares_ratio(e)
        anchor = old if config.proximal else behaviour
        s = torch.stack([logprobs[i] - anchor[i] for i in group]).mean().exp()
        advantage = batch.advantages[batch.trajectories[e]].double()
        objective = torch.minimum(
            s * advantage, s.clamp(1 - config.eps_low, 1 + config.eps_high) * advantage
        )
        if config.proximal:
            same = (
                [e]
                if config.importance_level == "token"
                else [i for i in trained if batch.trajectories[i] == batch.trajectories[e]]
            )
            correction = math.exp(sum(float(old[i] - behaviour[i]) for i in same) / len(same))
            objective = objective * min(correction, config.importance_cap)
        d = reference[e] - logprobs[e]
        kl = d.exp() - 1 - d
        penalty = config.kl_coefficient * kl - config.entropy_coefficient * entropies[e]
        total = total + batch.weights[e].double() * (penalty - objective)
    return total


OPTIONS = [
    dict(
        zip(
            ("ratio_level", "proximal", "importance_level", "max_staleness", "max_log_ratio"),
            values,
            strict=True,
        )
    )
    for values in itertools.product(
        ("trajectory", "execution", "token"),
        (False, True),
        ("token", "trajectory"),
        (None, 1),
        (None, 0.3),
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_equals_independent_float64(options):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        edges, trajectories = 24, 5
        rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731, B023
        executions = torch.tensor([0, 0, 1, 1, 1])
        owners = torch.randint(0, trajectories, (edges,), generator=generator)
        batch = EdgeBatch(  # weights and advantages belong to executions
            weights=(rand(2) / edges).float()[executions[owners]],
            behaviour_logprobs=(-1 - rand(edges)).float(),
            versions=torch.randint(0, 4, (edges,), generator=generator),
            trajectories=owners,
            advantages=(rand(2) * 2 - 1).float()[executions],
            executions=executions * 2 + 3,
        )
        config = GspoConfig(
            eps_low=0.1, eps_high=0.15, kl_coefficient=0.1, entropy_coefficient=0.05, **options
        )
        logprobs, entropies, reference = (-1 - rand(edges)), rand(edges), (-1 - rand(edges))
        old = (logprobs + 0.1 * rand(edges)).float()
        exact = [x.clone().requires_grad_() for x in (logprobs, entropies)]
        expected = independent_loss(*exact, reference, old.double(), batch, config, version=3)
        expected.backward()
        ours = [x.float().requires_grad_() for x in (logprobs, entropies)]
        kwargs = dict(old_logprobs=old, reference_logprobs=reference.float(), current_version=3)
        result = gspo_loss(*ours, batch, config, **kwargs)
        result.loss.backward()
        assert result.loss.item() == pytest.approx(expected.item(), rel=2e-5, abs=1e-6)
        levels = (config.ratio_level, config.importance_level)
        if (
            not config.proximal
            or config.ratio_level == "token"
            or levels == ("trajectory", "trajectory")
        ):
            # Where the correction varies under one ratio, the token form and the sequence form
            # differ by design.
            torch.testing.assert_close(ours[0].grad.double(), exact[0].grad, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(ours[1].grad.double(), exact[1].grad, rtol=2e-5, atol=1e-7)


class TestKnownFaults:
    def test_a_column_vector_is_refused_and_never_broadcast(self):
        """TRL#3823, verl#3245: a [B, 1] ratio spread over the token mask."""
        batch = make_batch([-1.0, -1.0], [0, 0], [1.0])
        with pytest.raises(TrajectoryError, match="shape"):
            gspo_loss(torch.zeros(2, 1), torch.zeros(2, 1), batch, GspoConfig())

    def test_masked_tokens_do_not_leak_into_the_ratio(self):
        """Soup#723: the ratio of a trajectory is over the tokens that train."""
        config = GspoConfig(eps_low=0.9, eps_high=9.0, max_staleness=1)
        batch = make_batch([-1.1, -9.0], [0, 0], [1.0], versions=[3, 0])
        result, grad = run((-1.0, -1.0), batch, config, current_version=4)
        assert result.ratios[0].item() == pytest.approx(math.exp(0.1), rel=1e-6)
        assert result.masked.tolist() == [False, True]
        assert grad[1].item() == 0.0

    def test_shares_of_a_batch_add_up_to_the_whole(self):
        """ms-swift#10076: a mean of micro-batch means weighs short micro-batches too much."""
        config = GspoConfig(eps_low=0.9, eps_high=9.0)
        whole = make_batch([-1.1, -1.2, -1.3, -0.9], [0, 1, 1, 1], [1.0, -2.0])
        logprobs = (-1.0, -1.1, -1.2, -1.0)
        expected, _ = run(logprobs, whole, config)
        first = make_batch([-1.1], [0], [1.0], weights=[0.25])
        second = make_batch([-1.2, -1.3, -0.9], [0, 0, 0], [-2.0], weights=[0.25] * 3)
        total = run(logprobs[:1], first, config)[0].loss + run(logprobs[1:], second, config)[0].loss
        assert total.item() == pytest.approx(expected.loss.item(), rel=1e-6)

    def test_one_broken_token_stays_finite(self):
        config = GspoConfig(eps_low=0.1, eps_high=0.1, ratio_level="token")
        result, grad = run((-1.0, -1.0), make_batch([-1.0, -200.0], [0, 0], [-1.0]), config)
        assert math.isfinite(result.loss.item()) and torch.isfinite(grad).all()

    def test_options_without_their_input_are_refused(self):
        batch = make_batch([-1.0], [0], [1.0])
        with pytest.raises(TrajectoryError, match="reference"):
            run((-1.0,), batch, GspoConfig(kl_coefficient=0.1))
        with pytest.raises(TrajectoryError, match="weight version"):
            run((-1.0,), batch, GspoConfig(max_staleness=1))


def test_context_parallel_shares_see_the_whole_trajectory():
    """Each rank holds some edges; sums over ranks give every rank the ratio of the whole."""
    config = GspoConfig(eps_low=0.9, eps_high=9.0)
    whole = make_batch([-1.1, -1.4, -1.3], [0, 0, 0], [1.0])
    logprobs = (-1.0, -1.1, -1.2)
    expected, grads = run(logprobs, whole, config)
    sums: list[torch.Tensor] = []
    for part in (slice(0, 1), slice(1, 3)):  # first pass: collect each share's sums
        share = make_batch(
            whole.behaviour_logprobs[part].tolist(), [0] * (part.stop - part.start), [1.0]
        )
        run(logprobs[part], share, config, reduce=lambda x: sums.append(x.clone()) or x)
    total = sum(sums)
    losses = 0.0
    for part in (slice(0, 1), slice(1, 3)):
        n = part.stop - part.start
        share = make_batch(
            whole.behaviour_logprobs[part].tolist(), [0] * n, [1.0], weights=[1 / 3] * n
        )
        result, grad = run(logprobs[part], share, config, reduce=lambda x: total.clone())
        losses += result.loss.item()
        assert grad.tolist() == pytest.approx(grads[part].tolist(), rel=1e-6)
    assert losses == pytest.approx(expected.loss.item(), rel=1e-6)
