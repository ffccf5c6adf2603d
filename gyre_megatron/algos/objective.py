"""The contract of a training objective: what it is given of a bin, and what it gives back.

`training.objective` names one; the trainer calls it once per bin on the last pipeline stage. Pure
functions of tensors; the one thing shared between ranks is `ObjectiveContext.reduce`.

Legend: E edges of this rank, J trajectories of the bin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gyre_megatron.config.training import GspoConfig
from gyre_megatron.errors import TrajectoryError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here before exp so that one broken token cannot make the loss infinite."""


@dataclass(frozen=True)
class EdgeBatch:
    """The edges of one bin (or this rank's share of them).

    Attributes:
        weights, behaviour_logprobs: fp32 [E]. A loss weighs each edge by `weights`, which were fixed
            at admission; shares of a batch then add up whatever the bins.
        versions: int64 [E]; weight version that sampled the label.
        trajectories: int64 [E]; index into the J columns.
        advantages: fp32 [J].
        executions: int64 [J]; trajectories with the same value belong to one execution.
    """

    weights: torch.Tensor
    behaviour_logprobs: torch.Tensor
    versions: torch.Tensor
    trajectories: torch.Tensor
    advantages: torch.Tensor
    executions: torch.Tensor


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may need beside the edges.

    Attributes:
        config: `training.gspo`.
        options: `training.objective_options`, for objectives of the user's own.
        reference_logprobs: fp32 [E] of the policy that training began from, where
            `config.kl_coefficient` is positive.
        weight_version: version in training.
        reduce: sums a detached tensor in place over the ranks that share the bin (context
            parallelism); None where this rank holds all of it.
    """

    config: GspoConfig = field(default_factory=GspoConfig)
    options: Mapping[str, Any] = field(default_factory=dict)
    reference_logprobs: torch.Tensor | None = None
    weight_version: int | None = None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class ObjectiveResult:
    """A loss with gradient, and what the metrics say of it.

    Attributes:
        loss: fp32 scalar: this rank's share of the batch's loss; shares add up.
        ratios: fp32 [E]; importance ratio of each edge before clamping or clipping; by default that
            of its own token.
        clipped, masked: bool [E]; edges whose gradient is cut, and edges left out; by default none.
    """

    loss: torch.Tensor
    ratios: torch.Tensor | None = None
    clipped: torch.Tensor | None = None
    masked: torch.Tensor | None = None


Objective = Callable[[torch.Tensor, torch.Tensor, EdgeBatch, ObjectiveContext], ObjectiveResult]
"""(logprobs fp32 [E], entropies fp32 [E], edges, context) -> result; both tensors carry gradient."""


@dataclass(frozen=True)
class Diagnostics:
    """Per-edge numbers behind the metrics, without gradient.

    Attributes:
        ratios: fp32 [E]; clipped, masked: bool [E]; as in `ObjectiveResult`.
        coefficients: fp32 [E]; d loss / d logprob.
        kl_behaviour: fp32 [E]; k3 estimate of KL(policy || behaviour).
        kl_reference: fp32 [E]; the same to the reference, zeros without one.
    """

    ratios: torch.Tensor
    clipped: torch.Tensor
    masked: torch.Tensor
    coefficients: torch.Tensor
    kl_behaviour: torch.Tensor
    kl_reference: torch.Tensor


def diagnose(
    result: ObjectiveResult, logprobs: torch.Tensor, edges: EdgeBatch, context: ObjectiveContext
) -> Diagnostics:
    """Check a result and fill in what an objective left out.

    Raises:
        TrajectoryError: the loss is no scalar, or a column does not have one entry per edge.
    """
    _check_result(result, logprobs)
    detached = logprobs.detach()
    none = torch.zeros_like(detached, dtype=torch.bool)
    gap = (detached - edges.behaviour_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    reference = context.reference_logprobs
    return Diagnostics(
        ratios=gap.exp() if result.ratios is None else result.ratios,
        clipped=none if result.clipped is None else result.clipped,
        masked=none if result.masked is None else result.masked,
        coefficients=_slopes(result.loss, logprobs),
        kl_behaviour=k3(detached, edges.behaviour_logprobs),
        kl_reference=torch.zeros_like(detached) if reference is None else k3(detached, reference),
    )


def _check_result(result: ObjectiveResult, logprobs: torch.Tensor) -> None:
    if not isinstance(result, ObjectiveResult):
        raise TrajectoryError(
            f"the objective gave a {type(result).__name__}; an ObjectiveResult was expected"
        )
    if result.loss.dim() != 0:
        raise TrajectoryError(
            f"the objective's loss has shape {tuple(result.loss.shape)}; it must be a scalar, the "
            "sum over edges of weight times loss"
        )
    columns = {"ratios": result.ratios, "clipped": result.clipped, "masked": result.masked}
    for name, column in columns.items():
        if column is not None and column.shape != logprobs.shape:
            raise TrajectoryError(
                f"the objective's {name} have shape {tuple(column.shape)}; one for each of the "
                f"{len(logprobs)} edges was expected"
            )


def _slopes(loss: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """d loss / d logprob, from the graph between the two alone."""
    if not loss.requires_grad:  # a rank without edges, or an objective that masked all of them
        return torch.zeros_like(logprobs)
    (slopes,) = torch.autograd.grad(loss, logprobs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(logprobs) if slopes is None else slopes


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of KL(policy || other): exp(d) - 1 - d with d = other - policy."""
    d = (other - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.exp() - 1 - d
