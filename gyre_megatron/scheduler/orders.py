"""What the scheduler can decide. One decision is a tuple of these; the runtime carries them out in
order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dispatch:
    """Create `num_groups` more groups of executions."""

    num_groups: int


@dataclass(frozen=True)
class Leave:
    """Move `cell` from rollout to training: re-route its calls, release its engine, join the
    running step."""

    cell: int


@dataclass(frozen=True)
class Return:
    """Move `cell` from training to rollout: take the current weights, serve again."""

    cell: int


@dataclass(frozen=True)
class FinishStep:
    """Reduce the gradients of the training prefix to the core, which steps the optimizer."""

    prefix: int
    """Number of cells that train, always cells 0..prefix-1."""


@dataclass(frozen=True)
class Publish:
    """Send the core's weights to every cell; engines that serve install them in place."""


@dataclass(frozen=True)
class Finish:
    """The run is over."""


Order = Dispatch | Leave | Return | FinishStep | Publish | Finish
