"""The objective as the loss of one micro-step, with what the journal wants to know of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state as mpu

from gyre_megatron.algos.extensions import Objective
from gyre_megatron.algos.objective import ObjectiveContext, diagnose
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training.pipeline import LossFunction
from gyre_megatron.training.step_metrics import micro_step_sums
from gyre_megatron.training.tree_batch import TreeBatch


def objective_loss(
    config: TrainingConfig,
    objective: Objective,
    weight_version: int | None = None,
    reference: Mapping[int, torch.Tensor] | None = None,
) -> LossFunction:
    """The loss of a batch from the statistics of its edges, and the sums of the micro-step.

    Args:
        weight_version: the version in training, for staleness.
        reference: log-probabilities of the reference policy by the batch's index; none without KL.
    """
    references = reference or {}

    def loss_function(batch: TreeBatch, statistics: torch.Tensor):
        logprobs, entropies, _ = statistics
        context = ObjectiveContext(
            config=config.gspo,
            options=config.objective_options,
            reference_logprobs=references.get(batch.index),
            weight_version=weight_version,
            reduce=_sum_over_context if config.cp > 1 else None,
        )
        result = objective(logprobs, entropies, batch.edges, context)
        diagnostics = diagnose(result, logprobs, batch.edges, context)
        return result.loss, micro_step_sums(
            batch, statistics, result.loss, diagnostics, weight_version
        )

    return loss_function


def _sum_over_context(x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x, group=mpu.get_context_parallel_group())
    return x
