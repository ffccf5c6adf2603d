"""Objectives that a configuration can name: ours, and what users bring."""

from __future__ import annotations

from gyre_megatron.algos.gspo import gspo
from gyre_megatron.algos.objective import Objective
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint

OBJECTIVES: ExtensionPoint[Objective] = ExtensionPoint(
    "training.objective",
    parameters=("logprobs", "entropies", "edges", "context"),
    builtin={"gspo": gspo},
    returns="algos.ObjectiveResult",
)


def load_objective(config: TrainingConfig) -> Objective:
    """The objective that the configuration names.

    Raises:
        ConfigError: there is none of that name, it cannot be called, or options were given to one
            of ours, which read `training.gspo`.
    """
    objective = OBJECTIVES.load(config.objective)
    if config.objective_options and config.objective in OBJECTIVES.builtin:
        raise ConfigError(
            f"training.objective_options: {config.objective} reads training.gspo and no options; "
            "remove them, or name an objective of your own"
        )
    return objective
