"""The one vocabulary of orders: what the scheduler decides, the control plane carries out and cells
are sent.

An order that concerns cells travels to them as it was decided, inside the envelope of
`runtime.protocol`, which adds the id. Invariant: an order says all that its receiver must know; no
receiver looks anything up or decides.
"""

from __future__ import annotations

import msgspec

# What the control plane does by itself ------------------------------


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Create `num_groups` more groups of executions."""

    num_groups: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the harnesses of the `num_executions` executions that have waited longest."""

    num_executions: int


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Pack `num_groups` ready groups into micro-steps of the step in progress: those that were
    dispatched under the oldest weights, of these the ones that finished first."""

    num_groups: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


# What cells are sent ------------------------------


class Leave(msgspec.Struct, frozen=True, tag=True):
    """`cells` move from rollout to training together: their calls go elsewhere, the memory of their
    engines goes to the trainers, their gradients are zeroed."""

    cells: tuple[int, ...]


class Return(msgspec.Struct, frozen=True, tag=True):
    """`cells` move from training to rollout together: their engines take their memory back and the
    weights of `version`, which the trainers hold."""

    cells: tuple[int, ...]
    version: int


class Sync(msgspec.Struct, frozen=True, tag=True):
    """The trainers of `cells` take the core's weights in the middle of a burst and zero their
    gradients; the core sends, and its own gradients stay."""

    cells: tuple[int, ...]
    version: int


class FinishStep(msgspec.Struct, frozen=True, tag=True):
    """Reduce the gradients of the training prefix to the core, which steps the optimizer."""

    step: int
    prefix: int
    """Number of cells that train, always cells 0..prefix-1."""
    skip: bool
    """The batch has no bins: no gradient exists, and Adam's momentum alone must not move
    weights."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Send the core's weights, now `version`, to every trainer; the engines of `install_in` take
    them in place while they serve."""

    version: int
    install_in: tuple[int, ...]


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """Write model and optimizer of the core after `step` steps."""

    step: int


class MicroStep(msgspec.Struct, frozen=True, tag=True):
    """Run forward and backward on these bins (`PackedBin.to_bytes`) and keep the gradients. Not
    decided: a cell that trains claims the next one when it has nothing else to do."""

    bins: tuple[bytes, ...]


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet; ask again."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the cell; `reason` is empty after a run that went well."""

    reason: str


SerialOrder = Leave | Return | Sync | FinishStep | Publish | Checkpoint
"""Orders that take time and of which one is carried out at a time."""

Order = Dispatch | Start | Admit | Finish | SerialOrder
"""What `decide` can return."""

CellOrder = SerialOrder | MicroStep | Wait | Stop
"""What a cell can be sent."""
