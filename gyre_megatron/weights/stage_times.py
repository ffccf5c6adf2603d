"""What one process did in a reshard, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_megatron.weights.direct import Sums


@dataclass
class StageTimes:
    """Seconds that one process spent in each stage, and what it moved; stages overlap, so they need
    not add up to the whole."""

    direct: float = 0.0
    """Copies into own targets and into peers' windows."""
    pack: float = 0.0
    wire: float = 0.0
    """Sender: handing buckets to the transport, and waiting for free ones."""
    wait: float = 0.0
    """Receiver: waiting for buckets, or for a writer's sums."""
    install: float = 0.0
    check: float = 0.0
    """Receiver: comparing what writers left in its windows with what they read."""
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_local: int = 0
    bytes_read: int = 0
    """Read by this process's own passes: packing, installing, copying, checksums. What a transport
    does inside (a socket's copies) is not in it."""
    bytes_written: int = 0
    sums: Sums = field(default_factory=dict)
    """With `sum_dtypes`: what this process's parcels add to the checksums of their targets."""
