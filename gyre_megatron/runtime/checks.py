"""Refuses layouts that cannot work before any process or port is taken."""

from __future__ import annotations

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
    training, ranks = config.training, topology.ranks_per_cell
    if ranks % training.min_ranks:
        raise ConfigError(
            f"a cell has {ranks} ranks, training.tp*pp*cp = "
            f"{training.tp}*{training.pp}*{training.cp} = "
            f"{training.min_ranks} does not divide it; change these keys, or start "
            f"{topology.num_cells * training.min_ranks} ranks "
            f"(cluster.num_cells={topology.num_cells})"
        )
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    _divides("training.tp", training.tp, "attention heads", heads)
    if kv_heads < training.tp:
        raise ConfigError(
            f"training.tp={training.tp} exceeds the model's {kv_heads} key-value heads; choose at "
            f"most {kv_heads}"
        )
    _divides("training.tp", training.tp, "key-value heads", kv_heads)
    if architecture.moe is not None:
        _divides("training.ep", training.ep, "experts", architecture.moe.num_experts)
    elif training.ep > 1:
        raise ConfigError(
            f"training.ep={training.ep}, but {architecture.family} has no experts; set training.ep "
            "to 1"
        )
    _divides("training.pp", training.pp * (training.vpp or 1), "layers", architecture.num_layers)
    engine_tp = config.engine.tp or ranks
    _divides("engine.tp", engine_tp, "attention heads", heads)
    if ranks % engine_tp:
        raise ConfigError(f"engine.tp={engine_tp} does not divide the {ranks} ranks of a cell")
    if config.engine.context_length > architecture.max_position_embeddings:
        raise ConfigError(
            f"engine.context_length={config.engine.context_length} exceeds the model's "
            "max_position_embeddings="
            f"{architecture.max_position_embeddings}; lower it"
        )


def _divides(key: str, size: int, what: str, count: int) -> None:
    if count % size:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        raise ConfigError(
            f"{key}={size} does not divide the model's {count} {what}; choose one of {divisors}"
        )
