"""What a publisher and the loader inside SGLang say to each other.

A command travels as the name of an empty tensor; every engine rank answers with a file in the
publisher's directory. msgspec checks both on arrival.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_megatron.weights.boxes import LocalBox
from gyre_megatron.weights.shadow import TensorSpec

SHADOW_FILE = "shadow.{rank}"
STATUS_FILE = "status.{rank}.json"
PERMIT_FILE = "permit"
"""While it lies in the publisher's directory the loader may commit."""
CLAIMED_FILE = "claimed"
"""What the first rank that commits renames the permit to; from then on it cannot be taken back."""
REVOKED_FILE = "revoked"
"""What the publisher renames the permit to when it gives up."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """One order to every rank of an engine."""

    op: str
    directory: str
    """The publisher's directory, which is also the epoch of its commands: it is gone, or nobody
    holds it, once the publisher has given up."""
    serial: int
    """Number of the command in its directory."""
    architecture: dict[str, Any] | None = None
    """attach: the model, as `Architecture.model_dump` writes it."""
    checksums: list[dict[str, int]] | None = None
    """verify: of every tensor of every rank's shadow; None leaves the comparison out."""


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one rank carried out a command."""

    rank: int
    serial: int
    ok: bool
    error: str = ""
    seconds: float = 0.0
    changed: bool = False
    """Whether live parameters may have been changed."""
    tensors: list[TensorSpec] = []
    """attach: the tensors of the shadow."""
    local_boxes: list[LocalBox] = []
    """attach: which boxes of the checkpoint they hold."""


encode = msgspec.json.encode
decode_command = msgspec.json.Decoder(Command).decode
decode_status = msgspec.json.Decoder(Status).decode
