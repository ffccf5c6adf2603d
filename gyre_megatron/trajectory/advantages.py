"""Advantages of a group: how much better each execution did than its companions.

An extension point: `rollout.processor.advantage` names `mean_std`, `mean`, or a function of the
user's own, `(rewards, config) -> list[float]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.extensions import ExtensionPoint

Advantage = Callable[[np.ndarray, ProcessorConfig], Sequence[float]]


def mean_std(rewards: np.ndarray, config: ProcessorConfig) -> list[float]:
    """Rewards minus their mean, over their standard deviation. Source: GRPO (arXiv 2402.03300)."""
    if _without_spread(rewards, config):
        return [0.0] * len(rewards)
    return ((rewards - rewards.mean()) / rewards.std()).tolist()


def mean(rewards: np.ndarray, config: ProcessorConfig) -> list[float]:
    """Rewards minus their mean. Source: Dr. GRPO (arXiv 2503.20783)."""
    if _without_spread(rewards, config):
        return [0.0] * len(rewards)
    return (rewards - rewards.mean()).tolist()


def _without_spread(rewards: np.ndarray, config: ProcessorConfig) -> bool:
    """Groups of one, and rewards that differ by rounding only, say nothing about the policy."""
    return len(rewards) < 2 or float(np.ptp(rewards)) < config.min_spread


ADVANTAGES: ExtensionPoint[Advantage] = ExtensionPoint(
    "rollout.processor.advantage",
    parameters=("rewards", "config"),
    builtin={"mean_std": mean_std, "mean": mean},
    returns="one finite float for each reward",
)


def group_advantages(rewards: np.ndarray, config: ProcessorConfig) -> list[float]:
    """Advantages of the executions of one group, by the function that the configuration names.

    Args:
        rewards: float64 [n], in the order of the executions.

    Raises:
        ConfigError: there is no such function.
        TrajectoryError: it did not give one finite number for each reward.
    """
    if len(rewards) == 0:
        return []
    advantages = [float(a) for a in ADVANTAGES.load(config.advantage)(rewards, config)]
    if len(advantages) != len(rewards) or not np.isfinite(advantages).all():
        raise TrajectoryError(
            f"rollout.processor.advantage={config.advantage} gave {advantages} for rewards "
            f"{rewards.tolist()}; expected {ADVANTAGES.returns}"
        )
    return advantages
