"""How weights move: transports, staging memory, checks, and how the engine is held while it takes
new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gyre_megatron.config.base import Section, UserPath


class WeightsConfig(Section):
    """The hot-swap layer."""

    transport: str = "auto"
    """What carries weights between ranks, into the engine of a cell and down the chain of cells:
    `ipc` (shared memory; ranks of one host write straight into the engine's next version),
    `collective` (gloo or NCCL), `mooncake`, `file`, or a `module:function` of your own. `auto` is
    `ipc` where all ranks see the same shared memory, and otherwise `collective` between hosts and
    shared memory within."""
    interface: str | None = None
    """Network interface (its name, or an address of this host) that gloo and Mooncake listen on and
    that a cell's engine serves on; NCCL reads NCCL_SOCKET_IFNAME. Unset: the one over which the
    host of rank 0 is reached."""
    file_dir: UserPath | None = None
    """Where the `file` transport keeps buckets on their way; all ranks must see it."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What the Transfer Engine speaks; `rdma` where the ranks have InfiniBand or RoCE ports."""
    staging_mib: int = Field(128, ge=1)
    """Most staging memory that one rank may hold at a time; larger buckets hide more latency."""
    delta: bool = False
    """Send other cells only what changed since the version that they hold, without loss. In bf16
    few elements change in a step, so this pays where the link between cells is the bottleneck; the
    core keeps a copy of its shard in host memory for it, and passes over it once."""
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
