"""What the modelled cluster charges, apart from any policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gyre_megatron.simulation.config import TransitionConfig
from gyre_megatron.simulation.serving import ServingModel


@dataclass(frozen=True)
class Costs:
    """Prices in seconds.

    Attributes:
        serving: of one cell.
        training_s_per_token: one cell, one packed token.
        tokens_per_micro_step: packed tokens of one micro-step.
        transitions: of roles and boundaries.
        move_s: seconds that a moved execution loses, from its context in tokens.
        streaming: training starts on finished groups while others run.
    """

    serving: ServingModel
    training_s_per_token: float
    tokens_per_micro_step: int
    transitions: TransitionConfig
    move_s: Callable[[float], float]
    streaming: bool = True
