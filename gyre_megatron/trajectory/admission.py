"""A finished group into the bins of the step in progress: what it weighs, and what may be left out.

Pure; called by the control plane for one group at a time, because groups are admitted while others
still run. Invariants:

- Every group weighs 1 / groups_per_step in the loss, whatever was excluded from it; the executions
  that count share that weight alike. An execution that counts but trained nothing (a placeholder)
  takes its share with it. A group in which nobody counts contributes nothing, and the others do
  not grow in its place: the denominators of groups that are already in training are fixed.
- Denominators are taken over all trees that count, before any is left out.
"""

from __future__ import annotations

from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.trajectory.packed_bin import PackedBin
from gyre_megatron.trajectory.packing import pack
from gyre_megatron.trajectory.processor import ProcessedGroup


def pack_group(
    group: ProcessedGroup, training: TrainingConfig, groups_per_step: int, linear_cost: int
) -> list[PackedBin]:
    """The bins of one group.

    Args:
        groups_per_step: groups whose losses are averaged in one step.
        linear_cost: of the model that is trained (`cost.linear_cost`).
    """
    if not group.trees:
        return []
    # A mean over tokens knows no executions: one without tokens takes no share of it.
    by_tokens = training.gspo.denominator == "batch_tokens"
    num_sharing = len(group.trees) if by_tokens else group.num_counted
    return pack(
        group.trees,
        training.token_budget,
        num_sharing * groups_per_step,
        denominator=training.gspo.denominator,
        constant_length=training.gspo.constant_length,
        keep_executions_whole=training.gspo.ratio_level == "execution",
        linear_cost=linear_cost,
        skip_zero_advantage=not trains_without_advantage(training),
    )


def trains_without_advantage(training: TrainingConfig) -> bool:
    """Whether an execution whose advantage is 0 can contribute a gradient.

    The clipped objective is a multiple of the advantage; the divergence from the reference, the
    entropy bonus and the load-balancing loss are not; an objective of the user's own may not be.
    """
    return (
        training.objective != "gspo"
        or training.gspo.kl_coefficient != 0.0
        or training.gspo.entropy_coefficient != 0.0
        or training.moe_aux_loss != 0.0
    )
