"""How weights move: transports, staging memory, checks, and how the engine is held while it takes
new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gyre_megatron.config.base import Section, UserPath


class WeightsConfig(Section):
    """The hot-swap layer."""

    transport: Literal["auto", "ipc", "collective", "mooncake", "file"] = "auto"
    """What carries buckets between the ranks of a cell. `auto` is `ipc` where all ranks share a
    host (one copy less) and `collective` (NCCL or gloo) otherwise."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What the Transfer Engine speaks; `rdma` where the ranks have InfiniBand or RoCE ports."""
    staging_mib: int = Field(128, ge=1)
    """Most staging memory that one rank may hold at a time; larger buckets hide more latency."""
    timeout_s: float = Field(120.0, gt=0)
    """A wait for another rank or for the engine that takes longer fails the swap everywhere; the
    old weights stay."""
    verify: bool = True
    """Compare checksums of every tensor before the engine commits. Costs one pass over the weights
    at memory speed."""
    pause_mode: Literal["retract", "abort"] = "retract"
    """How generation is held during the install. `retract` keeps calls in flight: they continue on
    the new weights and recompute their prefix, so no key or value of the old weights is reused.
    `abort` ends them with what they have."""
    shared_memory_dir: UserPath = Path("/dev/shm")
    """Where the next version's copy is assembled on the engine's host; must be memory-backed to be
    fast."""
    chunk_mib: int = Field(32, ge=1)
    """Size of the pieces that travel down the chain of cells: small enough to pipeline, large
    enough for full rate."""
