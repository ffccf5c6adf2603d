"""What `weights` of a configuration says is what transports, groups and addresses do."""

from __future__ import annotations

import inspect
import socket

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.weights import Inbox, Outbox, Peers, Transport, open_transport
from gyre_megatron.weights.network import local_address
from gyre_megatron.weights.transports.choose import TRANSPORTS
from gyre_megatron.weights.transports.collective import CollectiveTransport


def no_peers(config):
    """A hook that cannot be called with peers."""


class Mine(Transport):
    """Somebody's own transport."""

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes

    def outbox(self, peer: int) -> Outbox:
        raise NotImplementedError

    def inbox(self, peer: int, sizes) -> Inbox:
        raise NotImplementedError


def mine(config: WeightsConfig, peers: Peers) -> Transport:
    """The hook of the configuration."""
    return Mine(
        peers.kv_store,
        peers.process,
        peers.num_processes,
        peers.name,
        config.timeout_s,
        config.staging_mib << 20,
    )


def test_contract_of_a_transport():
    """What a hook may rely on; a change here is a change for everybody who wrote one."""
    assert TRANSPORTS.parameters == ("config", "peers")
    assert list(Peers.__dataclass_fields__) == [
        "kv_store",
        "process",
        "num_processes",
        "name",
        "device",
    ]
    assert list(inspect.signature(Transport.__init__).parameters)[1:] == [
        "kv_store",
        "process",
        "num_processes",
        "name",
        "timeout_s",
        "staging_bytes",
        "direct_directory",
    ]
    assert Transport.__abstractmethods__ == {"bucket_bytes", "outbox", "inbox"}
    assert Outbox.__abstractmethods__ == {"slot", "post", "flush"}
    assert Inbox.__abstractmethods__ == {"slot", "release", "close"}
    for make in TRANSPORTS.builtin.values():
        inspect.signature(make).bind("config", "peers")


def test_somebodys_own_transport_is_opened_with_what_the_configuration_says():
    config = WeightsConfig(transport=f"{__name__}:mine", staging_mib=7, timeout_s=9)
    transport = open_transport(config, dist.HashStore(), 1, 3, "x")
    assert type(transport).__name__ == "Mine"
    assert (transport.process, transport.num_processes) == (1, 3)
    assert (transport.bucket_bytes, transport.timeout_s) == (7 << 20, 9)


@pytest.mark.parametrize("kind", ["ipc", "collective", "file"])
@pytest.mark.parametrize("staging_mib", [1, 8])
def test_staging_memory_is_what_was_asked_for(tmp_path, kind, staging_mib):
    config = WeightsConfig(transport=kind, staging_mib=staging_mib, file_dir=tmp_path)
    transport = open_transport(config, dist.HashStore(), 0, 1)
    assert staging_mib << 18 <= transport.bucket_bytes <= staging_mib << 20


def test_interface_is_a_name_or_an_address_of_this_host():
    assert local_address("lo") == local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"no network interface or address 'nic7' .* lo \(127"):
        local_address("nic7")
    with pytest.raises(ConfigError, match=r"address '192\.0\.2\.1'"):  # of documentation only
        local_address("192.0.2.1")


def test_without_an_interface_it_is_the_route_to_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert local_address(None, dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"


def test_several_hosts_never_meet_on_loopback(monkeypatch):
    """The store's host sees itself under a loopback name; the other hosts do not."""
    import psutil

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    entry = psutil.net_if_addrs()["lo"][0]
    interfaces = {"lo": [entry], "eth0": [entry._replace(address="10.0.0.5")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert local_address(None, store) == "10.0.0.5"
    interfaces["eth1"] = [entry._replace(address="10.0.1.5")]
    with pytest.raises(ConfigError, match=r"\['10.0.0.5', '10.0.1.5'\]; set weights.interface"):
        local_address(None, store)


def test_gloo_listens_where_it_was_told_to():
    """A transport that is told an address of no interface cannot listen there."""
    address = "127.0.0.77"
    with socket.socket() as probe:
        probe.bind((address, 0))  # all of 127/8 is this host
    transport = CollectiveTransport(dist.HashStore(), 0, 1, timeout_s=5, address=address)
    transport.begin()
    transport.connect_streams()
    listening = {connection.laddr.ip for connection in _connections()}
    assert address in listening


def _connections():
    import psutil

    return psutil.Process().net_connections("tcp")


def test_transport_buffers_live_where_they_were_asked_for():
    config = WeightsConfig(transport="collective", staging_mib=1)
    transport = open_transport(config, dist.HashStore(), 0, 1, device="cpu")
    assert isinstance(transport, CollectiveTransport)
    assert transport.device == torch.device("cpu")
