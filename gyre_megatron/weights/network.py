"""Under which address the other hosts of a job reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import torch.distributed as dist

from gyre_megatron.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def local_address(interface: str | None, kv_store: dist.Store | None = None) -> str:
    """This host's address for connections from the job's other hosts.

    Args:
        interface: `weights.interface`: the name of a network interface, or an address of this host.
            None takes the address from which the store's host is reached.
        kv_store: the job's store, which all hosts reach.

    Raises:
        ConfigError: there is no such interface, or the host has several and none can be preferred.
    """
    if interface is not None:
        return _configured(interface)
    address = _towards(_host_of(kv_store) or os.environ.get("MASTER_ADDR", ""))
    if not ipaddress.ip_address(address).is_loopback or _one_host():
        return address
    # The store is on this host, under a name that means loopback here and something else elsewhere.
    outside = [a for name in psutil.net_if_addrs() for a in _addresses(name) if _is_outside(a)]
    if len(outside) != 1:
        raise ConfigError(
            f"the job spans hosts, and this one can be reached under {outside or 'no address'}; "
            "set weights.interface to the name of the network interface that the hosts share"
        )
    return outside[0]


def _configured(interface: str) -> str:
    every = {name: _addresses(name) for name in psutil.net_if_addrs()}
    if every.get(interface):
        return every[interface][0]
    if interface in (address for addresses in every.values() for address in addresses):
        return interface
    raise ConfigError(
        f"weights.interface: this host has no network interface or address {interface!r} with an "
        f"IP address; it has {', '.join(f'{n} ({a[0]})' for n, a in every.items() if a)}"
    )


def _addresses(name: str) -> list[str]:
    """Addresses of a network interface, IPv4 first."""
    found = psutil.net_if_addrs()[name]
    ordered = [entry.address for family in _FAMILIES for entry in found if entry.family == family]
    return [address for address in ordered if "%" not in address]  # link-local ones are of no use


def _is_outside(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


def _one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _host_of(kv_store: dist.Store | None) -> str | None:
    """Host of the TCP store below any prefixes; None for another kind of store."""
    while isinstance(kv_store, dist.PrefixStore):
        kv_store = kv_store.underlying_store
    return kv_store.host if isinstance(kv_store, dist.TCPStore) else None


def _towards(host: str) -> str:
    """The address from which this host would speak to `host`; nothing is sent."""
    if not host:
        return "127.0.0.1"
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"the route to the job's store on {host} cannot be found ({error}); set "
            "weights.interface to the network interface that the hosts share"
        ) from None
