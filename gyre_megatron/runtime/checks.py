"""Refuses layouts that cannot work before any process or port is taken."""

from __future__ import annotations

from gyre_megatron.config.layout_rules import check_engine_in_cell, check_serving, check_training
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError
from gyre_megatron.weights.process_groups import CellTopology


def check_architecture(config: GyreConfig, found: Architecture) -> None:
    """Check that the checkpoint has the shape that the configuration announces, if it announces
    one.

    Raises:
        ConfigError: they differ; the message names the fields.
    """
    announced = config.model.architecture
    if announced is None or announced == found:
        return
    fields = [
        name
        for name in Architecture.model_fields
        if getattr(announced, name) != getattr(found, name)
    ]
    differences = ", ".join(
        f"{name} {getattr(announced, name)!r} vs {getattr(found, name)!r}" for name in fields
    )
    raise ConfigError(
        f"model.architecture and {config.model.checkpoint} differ in {differences}; use the "
        "overlay of this model, or "
        "leave model.architecture out"
    )


def check_layout(config: GyreConfig, architecture: Architecture, topology: CellTopology) -> None:
    """Check that model, training layout, engine and cells fit together.

    Raises:
        ConfigError: they do not; the message names both numbers and the keys to change.
    """
    ranks = topology.ranks_per_cell
    engine_tp = config.engine.tp or ranks
    check_training(config.training, architecture, ranks)
    check_engine_in_cell(engine_tp, ranks)
    check_serving(architecture, engine_tp, config.engine.ep)
    if config.engine.context_length > architecture.max_position_embeddings:
        raise ConfigError(
            f"engine.context_length={config.engine.context_length} exceeds the model's "
            "max_position_embeddings="
            f"{architecture.max_position_embeddings}; lower it"
        )
