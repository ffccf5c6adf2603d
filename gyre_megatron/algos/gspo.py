"""GSPO on loss edges: pure functions of tensors, no model, no process groups but the one that
shares a bin.

Source: GSPO (arXiv 2507.18071), sequence ratio s = exp(mean_t(logp - logp_old)); its gradient
equals that of the token form, value s with gradient through each token, which is what is written
here. Adapted to executions: every edge carries its loss weight, fixed at admission (1 / trained
tokens of the execution / executions of the batch), so

    L = - sum_edges weight * min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A).

Legend: E edges, J trajectories.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gyre_megatron.algos.objective import (
    LOG_RATIO_LIMIT,
    EdgeBatch,
    ObjectiveContext,
    ObjectiveResult,
    k3,
)
from gyre_megatron.config.training import GspoConfig
from gyre_megatron.errors import TrajectoryError

Reduce = Callable[[torch.Tensor], torch.Tensor]


def gspo(
    logprobs: torch.Tensor, entropies: torch.Tensor, edges: EdgeBatch, context: ObjectiveContext
) -> ObjectiveResult:
    """`gspo_loss` as the trainer calls objectives: weights are frozen while the gradients of a step
    accumulate, so the proximal policy is the current one."""
    return gspo_loss(
        logprobs,
        entropies,
        edges,
        context.config,
        reference_logprobs=context.reference_logprobs,
        current_version=context.weight_version,
        reduce=context.reduce,
    )


def gspo_loss(
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    batch: EdgeBatch,
    config: GspoConfig,
    *,
    old_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    current_version: int | None = None,
    reduce: Reduce | None = None,
) -> ObjectiveResult:
    """Adapted GSPO loss of a bin's edges.

    Args:
        logprobs, entropies: fp32 [E] with gradient.
        old_logprobs: fp32 [E]; proximal policy under `config.proximal`; by default the current
            policy, whose weights are frozen while a step's gradients accumulate.
        reference_logprobs: fp32 [E]; needed where `config.kl_coefficient` is positive.
        current_version: weight version in training; needed where `config.max_staleness` is set.
        reduce: sums a detached tensor in place over the ranks that share the bin (context
            parallelism).

    Raises:
        TrajectoryError: columns disagree in shape, or an option lacks its input.
    """
    _check(logprobs, batch, config, reference_logprobs, current_version)
    detached = logprobs.detach()
    old = detached if old_logprobs is None else old_logprobs
    anchor = old if config.proximal else batch.behaviour_logprobs
    keep = _keep(detached, batch, config, current_version, reduce)

    log_ratio = _shared_log_ratio(detached - anchor, keep, batch, config.ratio_level, reduce)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    # Value: the shared ratio; gradient: through this token
    ratio = ratio * (logprobs - detached).exp()
    advantages = batch.advantages[batch.trajectories]
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * advantages
    objective = torch.minimum(unclipped, clipped)
    if config.proximal:
        objective = objective * _behaviour_correction(
            old - batch.behaviour_logprobs, keep, batch, config, reduce
        )

    per_edge = -objective - config.entropy_coefficient * entropies
    if reference_logprobs is not None:
        per_edge = per_edge + config.kl_coefficient * k3(logprobs, reference_logprobs)
    weights = torch.where(keep, batch.weights, 0.0)
    return ObjectiveResult(
        loss=(weights * torch.where(keep, per_edge, 0.0)).sum(),
        ratios=log_ratio.exp(),
        clipped=(clipped < unclipped).detach() & keep,
        masked=~keep,
    )


def _check(logprobs, batch: EdgeBatch, config: GspoConfig, reference, current_version) -> None:
    shapes = {
        n: tuple(getattr(batch, n).shape)
        for n in ("weights", "behaviour_logprobs", "versions", "trajectories")
    }
    if logprobs.dim() != 1 or any(shape != tuple(logprobs.shape) for shape in shapes.values()):
        raise TrajectoryError(
            f"edge columns must all have the shape of logprobs {tuple(logprobs.shape)}: {shapes}"
        )
    if config.kl_coefficient > 0 and reference is None:
        raise TrajectoryError("training.gspo.kl_coefficient > 0 needs reference log-probabilities")
    if config.max_staleness is not None and current_version is None:
        raise TrajectoryError("training.gspo.max_staleness needs the weight version in training")


def _group_mean(values, keep, groups, num_groups: int, reduce) -> torch.Tensor:
    """Mean over the kept edges of each group, back on the edges; sums run in fp32 over all ranks
    that share the bin."""
    sums = values.new_zeros(2, num_groups)
    sums[0].index_add_(0, groups, torch.where(keep, values, 0.0))
    sums[1].index_add_(0, groups, keep.to(values.dtype))
    if reduce is not None:
        sums = reduce(sums)
    return (sums[0] / sums[1].clamp(min=1))[groups]


def _shared_log_ratio(log_ratio, keep, batch: EdgeBatch, level: str, reduce) -> torch.Tensor:
    if level == "token":
        return log_ratio
    if level == "trajectory":
        return _group_mean(log_ratio, keep, batch.trajectories, len(batch.advantages), reduce)
    _, dense = torch.unique(batch.executions, return_inverse=True)
    return _group_mean(log_ratio, keep, dense[batch.trajectories], len(batch.advantages), reduce)


def _behaviour_correction(
    log_ratio, keep, batch: EdgeBatch, config: GspoConfig, reduce
) -> torch.Tensor:
    """Truncated importance weight of the proximal policy over the behaviour policy, without
    gradient."""
    if config.importance_level == "trajectory":
        log_ratio = _group_mean(log_ratio, keep, batch.trajectories, len(batch.advantages), reduce)
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp().clamp(max=config.importance_cap)


def _keep(detached, batch: EdgeBatch, config: GspoConfig, current_version, reduce) -> torch.Tensor:
    """Edges that train: fresh enough, and in a trajectory the policy has not left too far
    behind."""
    keep = torch.ones_like(detached, dtype=torch.bool)
    if config.max_staleness is not None:
        keep &= current_version - batch.versions <= config.max_staleness
    if config.max_log_ratio is not None:
        log_ratio = detached - batch.behaviour_logprobs
        mean = _group_mean(log_ratio, keep, batch.trajectories, len(batch.advantages), reduce)
        keep &= mean.abs() <= config.max_log_ratio
    return keep
