"""Sums that describe a micro-step: they add up over micro-steps, replicas and cells."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from gyre_megatron.algos.objective import Diagnostics
from gyre_megatron.training.tree_batch import TreeBatch

ROLES = ("main", "main_summary", "sub_agent", "sub_agent_summary", "auxiliary")
SUMS = (
    "loss",
    "num_tokens",
    "num_edges",
    "num_trajectories",
    "num_clipped",
    "num_masked",
    "ratio_sum",
    "entropy_sum",
    "kl_behaviour_sum",
    "kl_reference_sum",
    "logprob_gap_sum",
    "staleness_sum",
)
"""Divide a `_sum` by `num_edges` for its mean. `ratio_sum` is before clamping and clipping."""
KEYS = (
    *SUMS,
    *(f"num_edges/{role}" for role in ROLES),
    *(f"logit_gradient_square/{role}" for role in ROLES),
)
"""`logit_gradient_square/<role>` is the squared norm of the loss's gradient at the logits, per
trajectory role."""


def micro_step_sums(
    batch: TreeBatch,
    statistics: torch.Tensor,
    loss: torch.Tensor,
    diagnostics: Diagnostics,
    version: int | None,
) -> torch.Tensor:
    """The sums of one bin on this rank, fp64 [len(KEYS)], in the order of KEYS."""
    edges = batch.edges
    bin_ = batch.bin
    first_of_bin = mpu.get_context_parallel_rank() == 0
    logprobs, entropies, square_norms = statistics.detach()
    stale = (
        (version - edges.versions).double().sum()
        if version is not None
        else torch.zeros((), dtype=torch.float64)
    )
    values = [
        loss.detach(),
        bin_.num_tokens * first_of_bin,
        len(logprobs),
        len(bin_.trajectory_advantages) * first_of_bin,
        diagnostics.clipped.sum(),
        diagnostics.masked.sum(),
        diagnostics.ratios.double().sum(),
        entropies.double().sum(),
        diagnostics.kl_behaviour.double().sum(),
        diagnostics.kl_reference.double().sum(),
        (logprobs - edges.behaviour_logprobs).abs().double().sum(),
        stale,
    ]
    roles = torch.tensor(
        [_role(name) for name in bin_.trajectory_roles], dtype=torch.long, device=logprobs.device
    )
    edge_roles = roles[edges.trajectories] if len(roles) else edges.trajectories
    by_role = torch.zeros(2, len(ROLES), dtype=torch.float64, device=logprobs.device)
    by_role[0].index_add_(0, edge_roles, torch.ones_like(logprobs, dtype=torch.float64))
    by_role[1].index_add_(
        0, edge_roles, (diagnostics.coefficients.square() * square_norms).double()
    )
    scalars = torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=logprobs.device) for v in values]
    )
    return torch.cat([scalars, by_role.flatten()])


def _role(name: str) -> int:
    return ROLES.index(name) if name in ROLES else len(ROLES) - 1


def reduce_sums(per_bin: list[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Sum over the cell; every rank gets the same. Tensor-parallel ranks hold copies, so one of
    them counts."""
    total = torch.zeros(len(KEYS), dtype=torch.float64, device=device)
    if mpu.get_tensor_model_parallel_rank() == 0:
        for sums in per_bin:
            total += sums
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return dict(zip(KEYS, total.tolist(), strict=True))
