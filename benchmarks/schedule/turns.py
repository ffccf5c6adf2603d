"""A policy whose steps take turns between policies, so that all of them meet the same engines,
trainers, tasks and moments of the machine in one run.

Named as `scheduler.policy`; the turns come from the environment, because a policy is a pure function
of state and configuration. Without lag nothing of one step reaches into the next, so that a turn may
end after any step; its first step is dropped by the analysis, since cells still stand where the turn
before left them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler import POLICIES, SchedulerState

VARIABLE = "GYRE_SCHEDULE_TURNS"


@dataclass(frozen=True)
class Turns:
    """Who decides when.

    Attributes:
        policies: names in turn; `async2` is the policy async with two training cells.
        steps: steps of a turn.
    """

    policies: tuple[str, ...]
    steps: int

    def to_json(self) -> str:
        """For the environment of the run."""
        return json.dumps({"policies": self.policies, "steps": self.steps})

    @classmethod
    def from_json(cls, text: str) -> Turns:
        value = json.loads(text)
        return cls(tuple(value["policies"]), value["steps"])

    def policy_of(self, step: int) -> str:
        """The policy of a step, counted from 1. Every other round goes backwards, so that no policy
        always follows the same one."""
        turn = (step - 1) // self.steps
        lap, index = divmod(turn, len(self.policies))
        names = self.policies if lap % 2 == 0 else self.policies[::-1]
        return names[index]

    def is_first(self, step: int) -> bool:
        """Whether the policy before this step was another one."""
        return step == 1 or self.policy_of(step - 1) != self.policy_of(step)


def split(name: str) -> tuple[str, int]:
    """A turn's name as policy and number of training cells."""
    if name.startswith("async"):
        return "async", int(name.removeprefix("async") or 1)
    return name, 1


@cache
def _turns() -> Turns:
    return Turns.from_json(os.environ[VARIABLE])


def policy(state: SchedulerState, config: SchedulerConfig) -> int:
    """What the policy of the step in progress wants."""
    last = state.total_steps
    name, cells = split(_turns().policy_of(min(state.published_steps + 1, last)))
    own = config.model_copy(update={"policy": name, "async_training_cells": cells})
    return POLICIES.load(name)(state, own)
