"""From `weights.transport` of the configuration to a transport over the ranks of a cell."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.collective import CollectiveTransport
from gyre_megatron.weights.transports.file import FileTransport
from gyre_megatron.weights.transports.ipc import IpcTransport
from gyre_megatron.weights.transports.mooncake import Endpoint, MooncakeTransport

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_transport(
    config: WeightsConfig,
    store: dist.Store,
    process: int,
    num_processes: int,
    name: str = "gyre/weights",
    device: torch.device | str = "cpu",
    folder: Path | None = None,
) -> Transport:
    """Make the configured transport; collective, because `auto` asks all processes where they run.

    Args:
        store: reached by all processes.
        name: unique among the transports of one store.
        device: where staging buffers live; shared memory is on the host.
        folder: directory that all processes see, for the `file` transport.

    Raises:
        TransferError: a process did not answer, or `file` was asked for without a folder.
    """
    kind = config.transport
    if kind == "auto":
        kind = (
            "ipc"
            if _one_host(store, process, num_processes, name, config.timeout_s)
            else "collective"
        )
    common: dict[str, Any] = dict(
        name=f"{name}/{kind}", timeout_s=config.timeout_s, staging_bytes=config.staging_mib << 20
    )
    if kind == "ipc":
        return IpcTransport(
            store, process, num_processes, directory=config.shared_memory_dir, **common
        )
    if kind == "collective":
        return CollectiveTransport(store, process, num_processes, device=device, **common)
    if kind == "mooncake":
        endpoint = Endpoint(socket.gethostbyname(socket.gethostname()), config.mooncake_protocol)
        return MooncakeTransport(store, process, num_processes, endpoint=endpoint, **common)
    if folder is None:
        raise TransferError(
            "weights.transport=file needs a folder that all processes see; pass one, or choose auto"
        )
    return FileTransport(store, process, num_processes, folder, **common)


def _one_host(
    store: dist.Store, process: int, num_processes: int, name: str, timeout_s: float
) -> bool:
    meet = Rendezvous(dist.PrefixStore(f"{name}/hosts", store), process, num_processes, timeout_s)
    here = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else socket.gethostname().encode()
    answers = meet.exchange(here)
    if None in answers:
        raise TransferError(
            "choosing a weight transport: processes "
            f"{[i for i, a in enumerate(answers) if a is None]} "
            f"did not answer in {timeout_s} s"
        )
    return len(set(answers)) == 1
