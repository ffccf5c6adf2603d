"""What the control plane and the cells say to each other: MessagePack over HTTP on the control
plane.

A cell's leader asks `POST /cells/{cell}/next` for one order at a time, its cell carries it out, and
the leader answers with `POST /cells/{cell}/report`. The orders themselves are the scheduler's
(`scheduler.orders`); this module adds what travel needs. Invariant: an id is given to one order of
one cell, once in a run of the control plane, so a report can be told from its repetition.
"""

from __future__ import annotations

import msgspec

from gyre_megatron.scheduler.orders import CellOrder

LOGPROB_GAP = "logprob_gap"
"""Metric of an order that installed weights: largest difference between trainer and engine, in
nats."""
INSTALL_SECONDS = "install_seconds"
"""Metric of an order that installed weights: wall time until the engine served them."""
TRANSFER_SECONDS = "transfer_seconds"
"""Metric of a publication: wall time of the core's weights on their way to the cell's trainer."""


class Envelope(msgspec.Struct, frozen=True):
    """An order on its way to a cell."""

    order_id: int
    order: CellOrder


class Register(msgspec.Struct, frozen=True):
    """A cell that is ready to serve.

    Attributes:
        engine_url: its SGLang server.
        version: weight version of trainer and engine (steps trained).
        logprob_gap: largest difference found between the two, in nats.
        pulls: whether its trainer takes the core's weights without the core's help.
    """

    engine_url: str
    version: int
    logprob_gap: float
    pulls: bool = False


class Report(msgspec.Struct, frozen=True):
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


class Started(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to all ranks: the control plane is up.

    Attributes:
        url, token: where it listens, and what cells show it.
        step: optimizer steps in the checkpoint that the run goes on from; 0 for a new run.
        checkpoint: the model's Hugging Face directory.
    """

    url: str
    token: str
    step: int
    checkpoint: str


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to all ranks: the run does not start."""

    message: str


encode = msgspec.msgpack.encode
envelope_decoder = msgspec.msgpack.Decoder(Envelope)
start_decoder = msgspec.json.Decoder(Started | StartFailed)


def encode_start(message: Started | StartFailed) -> str:
    """As JSON, because torch's stores hold text."""
    return msgspec.json.encode(message).decode()
