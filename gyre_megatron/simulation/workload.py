"""What agents ask of a cluster: how long executions are, and how the time of one divides.

Owns the workload section of a simulation and draws executions from it. Spread between tasks,
spread between the executions of one task, and the time-out are separate, because they act
differently: elastic scheduling lives on the spread within a group, never on one lognormal over
everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from gyre_megatron.config.base import Section


class WorkloadConfig(Section):
    """A family of tasks as an unattended coding agent meets them."""

    mean_calls: float = Field(120.0, gt=0)
    """Model calls of an execution, averaged over tasks; sub-agents' calls included."""
    sigma_task: float = Field(0.4, ge=0)
    """Lognormal spread of the number of calls between tasks."""
    sigma_execution: float = Field(0.25, ge=0)
    """Lognormal spread within the executions of one task. 0.25 gives the published ratio 1.53 of
    mean longest-of-16 over mean."""
    sigma_speed: float = Field(0.1, ge=0)
    """Lognormal spread of an execution's mean tool time around that of the workload."""
    output_tokens: float = Field(440.0, gt=0)
    """Sampled tokens of a call, mean."""
    appended_tokens: float = Field(900.0, ge=0)
    """Tokens that a call adds to its prompt beyond the last answer (tool results), mean."""
    tool_s: float = Field(17.0, ge=0)
    """Time between an answer and the next call, mean, human time excluded."""
    first_tokens: float = Field(20_000.0, ge=0)
    """Tokens of the first prompt: system, tools, task. Shared by the executions of a group."""
    max_context_tokens: float = Field(200_000.0, gt=0)
    """Context at which the harness compacts its history."""
    summary_tokens: float = Field(30_000.0, ge=0)
    """Context right after a compaction."""
    trained_share: float = Field(1.0, gt=0, le=1)
    """Tokens that training computes over tokens that an execution holds: at most J_max branches,
    each shared token once."""
    death_share: float = Field(0.0, ge=0, lt=1)
    """Executions that die at a random moment of their life and give nothing to train."""
    timeout_s: float | None = Field(None, gt=0)
    """Wall time after which a harness is ended and what it left is scored; None never ends it."""

    @model_validator(mode="after")
    def _compacts_to_less(self) -> WorkloadConfig:
        if self.summary_tokens >= self.max_context_tokens:
            raise ValueError(
                f"summary_tokens={self.summary_tokens:g} must be below max_context_tokens="
                f"{self.max_context_tokens:g}: a compaction makes the context shorter"
            )
        return self

    @property
    def growth_tokens(self) -> float:
        """Tokens by which the context grows in a call."""
        return self.output_tokens + self.appended_tokens

    def mean_context(self, num_calls: float) -> float:
        """Mean context over an execution of `num_calls` calls, a saw tooth once it compacts."""
        until_compaction = max(self.max_context_tokens - self.first_tokens, 0) / self.growth_tokens
        if num_calls <= until_compaction:
            return self.first_tokens + num_calls * self.growth_tokens / 2
        before = until_compaction * (self.first_tokens + self.max_context_tokens) / 2
        after = (num_calls - until_compaction) * (self.summary_tokens + self.max_context_tokens) / 2
        return (before + after) / num_calls

    def trained_tokens(self, num_calls: float) -> float:
        """Unique tokens of an execution that training computes."""
        return self.trained_share * (self.first_tokens + num_calls * self.growth_tokens)


@dataclass(frozen=True)
class Executions:
    """Demands of the executions of a run, by number; groups of N lie together.

    Attributes:
        calls: float64 [n]; model calls.
        tool_s: float64 [n]; mean seconds between calls.
        trained_tokens: float64 [n]; unique tokens that training computes.
        context_tokens: float64 [n]; mean context.
    """

    calls: np.ndarray
    tool_s: np.ndarray
    trained_tokens: np.ndarray
    context_tokens: np.ndarray


def draw(workload: WorkloadConfig, num_groups: int, group_size: int, seed: int) -> Executions:
    """Draw the executions of `num_groups` groups of `group_size`; equal seeds give equal runs.

    Means hold whatever the spreads: a lognormal of spread s is shifted by -s^2/2.
    """
    rng = np.random.default_rng(seed)
    task = _lognormal(rng, workload.sigma_task, num_groups).repeat(group_size)
    execution = _lognormal(rng, workload.sigma_execution, num_groups * group_size)
    speed = _lognormal(rng, workload.sigma_speed, num_groups * group_size)
    calls = np.maximum(workload.mean_calls * task * execution, 1.0)
    trained = np.array([workload.trained_tokens(c) for c in calls])
    if workload.death_share:
        dies = rng.random(len(calls)) < workload.death_share
        calls = np.where(dies, np.maximum(calls * rng.random(len(calls)), 1.0), calls)
        trained[dies] = 0.0
    return Executions(
        calls=calls,
        tool_s=workload.tool_s * speed,
        trained_tokens=trained,
        context_tokens=np.array([workload.mean_context(c) for c in calls]),
    )


def _lognormal(rng: np.random.Generator, sigma: float, size: int) -> np.ndarray:
    return np.exp(rng.normal(-sigma * sigma / 2, sigma, size)) if sigma else np.ones(size)
