"""Refuses what cannot work before a process, a port or a file is made.

Called by rank 0 at the start of a run, cheapest first: `check_inputs` needs only the configuration,
`check_architecture` and `check_layout` the model's config.json.
"""

from __future__ import annotations

import os
from pathlib import Path

from gyre_megatron.config.layout_rules import check_engine_in_cell, check_serving, check_training
from gyre_megatron.config.limits import Limits, derive_limits
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError, RunDirectoryError
from gyre_megatron.harness.extensions import load_extensions as load_harness_extensions
from gyre_megatron.proxy.extensions import load_extensions as load_proxy_extensions
from gyre_megatron.scheduler import SchedulerState, decide
from gyre_megatron.trajectory.advantages import ADVANTAGES
from gyre_megatron.weights.process_groups import CellTopology
from gyre_megatron.weights.transports.choose import check_transport


def check_inputs(config: GyreConfig) -> None:
    """Check what needs neither the model nor other ranks: paths, tasks, and every extension that
    is named, so that no wrong name ends a run that is under way.

    Raises:
        ConfigError: a task or a name is wrong.
        PolicyError: the policy gives no usable answer.
        RunDirectoryError: the run's directory cannot be written.
    """
    check_writable(config.run.root / config.run.name)
    load_harness_extensions(config.rollout.harness)
    load_proxy_extensions(config.rollout.proxy)
    check_transport(config.weights)
    ADVANTAGES.load(config.rollout.processor.advantage)
    nothing_yet = SchedulerState.at_start(config.cluster.num_cells, config.run.num_steps)
    decide(nothing_yet, config.scheduler)  # loads the policy and asks it once


def check_writable(path: Path) -> None:
    """Check that a run's directory exists and can be written, or can be made. Makes nothing.

    Raises:
        RunDirectoryError: it cannot.
    """
    existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        problem = f"{existing} is no directory"
    elif not os.access(existing, os.W_OK | os.X_OK):  # also False on a read-only file system
        problem = f"{existing} is read-only, or belongs to somebody else"
    else:
        return
    raise RunDirectoryError(
        f"the run cannot be kept in {path}: {problem}; set run.root to a directory that can be "
        "written"
    )


def limits_of(config: GyreConfig, checkpoint: Path) -> Limits:
    """The limits of a run that trains `checkpoint`.

    Raises:
        ConfigError: two keys contradict each other.
    """
    architecture = Architecture.from_checkpoint(checkpoint, config.model.family)
    return derive_limits(config, architecture.max_position_embeddings)


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
