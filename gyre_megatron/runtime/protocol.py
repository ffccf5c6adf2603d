"""What the control plane and the cells say to each other: MessagePack structs over HTTP on the
control plane.

A cell's leader asks `POST /cells/{cell}/next` for one order at a time, its cell carries it out, and
the leader answers with `POST /cells/{cell}/report`. Cells never decide anything.
"""

from __future__ import annotations

import msgspec


class Join(msgspec.Struct, tag=True):
    """Leave rollout: give the engine's memory to the trainer and zero the gradients for `step`."""

    order_id: int
    step: int


class Sync(msgspec.Struct, tag=True):
    """Take the core's weights into the trainer; carried out by cells 0..prefix-1 together."""

    order_id: int
    prefix: int
    version: int


class MicroStep(msgspec.Struct, tag=True):
    """Run forward and backward on these bins (`PackedBin.to_bytes`) and keep the gradients."""

    order_id: int
    bins: list[bytes]


class FinishStep(msgspec.Struct, tag=True):
    """Reduce gradients over cells 0..prefix-1 to the core, which steps its optimizer unless
    `skip`."""

    order_id: int
    step: int
    prefix: int
    skip: bool
    """Every advantage of the batch was zero: no gradient exists, and Adam's momentum alone must not
    move weights."""


class Publish(msgspec.Struct, tag=True):
    """Take the core's weights into every trainer; cells that serve install them in their engine in
    place."""

    order_id: int
    version: int
    install: bool


class Serve(msgspec.Struct, tag=True):
    """Return to rollout: the engine takes its memory back and the trainer's current weights."""

    order_id: int
    version: int


class Checkpoint(msgspec.Struct, tag=True):
    """Write model and optimizer of the core cell below `directory`."""

    order_id: int
    directory: str


class Stop(msgspec.Struct, tag=True):
    """End the cell; `reason` is empty after a run that went well."""

    order_id: int
    reason: str


class Wait(msgspec.Struct, tag=True):
    """Nothing to do yet; ask again."""


CellOrder = Join | Sync | MicroStep | FinishStep | Publish | Serve | Checkpoint | Stop | Wait


class Register(msgspec.Struct):
    """A cell that is ready to serve.

    Attributes:
        engine_url: its SGLang server.
        version: weight version of trainer and engine (steps trained).
        logprob_gap: largest difference found between the two, in nats.
    """

    engine_url: str
    version: int
    logprob_gap: float


class Report(msgspec.Struct):
    """An order was carried out, or failed with `error`.

    Attributes:
        metrics: numbers that the order produced; micro-step metrics add up over micro-steps and
            cells.
        seconds: wall time the order took.
    """

    order_id: int
    metrics: dict[str, float]
    seconds: float
    error: str = ""


order_decoder = msgspec.msgpack.Decoder(CellOrder)
