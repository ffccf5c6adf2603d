"""From `weights.transport` of the configuration to a transport among some processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.weights.network import local_address
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.shared_memory import memory_identity
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.collective import CollectiveTransport
from gyre_megatron.weights.transports.file import FileTransport
from gyre_megatron.weights.transports.ipc import IpcTransport
from gyre_megatron.weights.transports.mooncake import Endpoint, MooncakeTransport


@dataclass(frozen=True)
class Peers:
    """Between whom a transport shall be made.

    Attributes:
        kv_store: reached by all of them.
        process, num_processes: this process's number, and how many there are.
        name: unique among the transports of one store.
        device: where staging buffers live, if the transport can choose.
    """

    kv_store: dist.Store
    process: int
    num_processes: int
    name: str
    device: torch.device


TransportMaker = Callable[[WeightsConfig, Peers], Transport]


def _auto(config: WeightsConfig, peers: Peers) -> Transport:
    # Between tensors of a device NCCL is faster than memory of the host.
    if peers.device.type == "cpu" and _share_memory(config, peers):
        return _ipc(config, peers)
    return _collective(config, peers, config.shared_memory_dir)


def _ipc(config: WeightsConfig, peers: Peers) -> Transport:
    return IpcTransport(**_common(config, peers, "ipc"), directory=config.shared_memory_dir)


def _collective(
    config: WeightsConfig, peers: Peers, direct_directory: Path | None = None
) -> Transport:
    return CollectiveTransport(
        **_common(config, peers, "collective"),
        device=peers.device,
        address=local_address(config.interface, peers.kv_store),
        direct_directory=direct_directory,
    )


def _mooncake(config: WeightsConfig, peers: Peers) -> Transport:
    address = local_address(config.interface, peers.kv_store)
    endpoint = Endpoint(address, config.mooncake_protocol)
    return MooncakeTransport(**_common(config, peers, "mooncake"), endpoint=endpoint)


def _file(config: WeightsConfig, peers: Peers) -> Transport:
    return FileTransport(**_common(config, peers, "file"), directory=_file_dir(config))


def _file_dir(config: WeightsConfig) -> Path:
    if config.file_dir is None:
        raise ConfigError(
            "weights.transport is file, but weights.file_dir is not set; name a directory that all "
            "ranks see"
        )
    return config.file_dir


TRANSPORTS: ExtensionPoint[TransportMaker] = ExtensionPoint(
    key="weights.transport",
    parameters=("config", "peers"),
    builtin={
        "auto": _auto,
        "ipc": _ipc,
        "collective": _collective,
        "mooncake": _mooncake,
        "file": _file,
    },
    returns="weights.Transport",
)


def check_transport(config: WeightsConfig) -> None:
    """Check what `weights` says about the transport, before anything starts.

    Raises:
        ConfigError: there is no such transport, or it misses a setting.
    """
    TRANSPORTS.load(config.transport)
    if config.transport == "file":
        _file_dir(config)
    if config.interface is not None:
        local_address(config.interface)


def open_transport(
    config: WeightsConfig,
    kv_store: dist.Store,
    process: int,
    num_processes: int,
    name: str = "gyre/weights",
    device: torch.device | str = "cpu",
) -> Transport:
    """Make the configured transport; collective, because `auto` asks all processes where they run.

    Args:
        kv_store: reached by all processes.
        name: unique among the transports of one store.
        device: where staging buffers live, if the transport can choose.

    Raises:
        ConfigError: there is no such transport, or it misses a setting.
        TransferError: a process did not answer.
    """
    make = TRANSPORTS.load(config.transport)
    return make(config, Peers(kv_store, process, num_processes, name, torch.device(device)))


def _common(config: WeightsConfig, peers: Peers, kind: str) -> dict[str, Any]:
    return dict(
        kv_store=peers.kv_store,
        process=peers.process,
        num_processes=peers.num_processes,
        name=f"{peers.name}/{kind}",
        timeout_s=config.timeout_s,
        staging_bytes=config.staging_mib << 20,
    )


def _share_memory(config: WeightsConfig, peers: Peers) -> bool:
    """Whether all processes see the same shared memory."""
    meeting = Rendezvous(
        dist.PrefixStore(f"{peers.name}/hosts", peers.kv_store),
        peers.process,
        peers.num_processes,
        config.timeout_s,
    )
    here = memory_identity(config.shared_memory_dir).encode()
    return len(set(meeting.exchange("choosing a weight transport", payload=here))) == 1
