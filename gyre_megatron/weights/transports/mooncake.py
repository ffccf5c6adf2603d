"""One-sided reads with Mooncake's Transfer Engine: RDMA on a cluster, TCP on a CPU.

As a bucket transport the receiver reads each bucket out of the sender's registered slots; the store
carries only counters. After a failed read the engine may still write into its destination later (seen
with TCP), so a destination is never used again after a failure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError, VersionError
from gyre_megatron.weights.rendezvous import WaitError
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport

_WINDOW = 2
_graveyard: list[torch.Tensor] = []
"""Destinations of failed reads; kept so that a late write hits memory that nobody uses."""


class _Slots(msgspec.Struct, array_like=True):
    """Where a peer's slots lie."""

    session: str
    address: int


_decode_slots = msgspec.msgpack.Decoder(_Slots).decode


class Endpoint:
    """One Transfer Engine of this process."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise VersionError(
                f"Mooncake's Transfer Engine cannot be loaded ({error}); install "
                "mooncake-transfer-engine (or its "
                "-non-cuda build) and libibverbs1 librdmacm1 libnuma1"
            ) from error
        self._engine = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code:
            raise TransferError(
                f"the Transfer Engine could not start on {host} with {protocol}: code {code}"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: dict[int, torch.Tensor] = {}

    def register(self, tensor: torch.Tensor) -> None:
        """Let peers read and this process write `tensor` (contiguous), which is kept alive."""
        if tensor.data_ptr() in self._registered:
            return
        code = self._engine.register_memory(
            tensor.data_ptr(), tensor.numel() * tensor.element_size()
        )
        if code:
            raise TransferError(
                f"registering {tensor.numel() * tensor.element_size()} bytes failed: code {code}"
            )
        self._registered[tensor.data_ptr()] = tensor

    def unregister(self, tensor: torch.Tensor) -> None:
        if self._registered.pop(tensor.data_ptr(), None) is not None:
            self._engine.unregister_memory(tensor.data_ptr())

    def close(self) -> None:
        for tensor in list(self._registered.values()):
            self.unregister(tensor)

    def read(
        self, session: str, target: torch.Tensor, address: int, nbytes: int, timeout_s: float
    ) -> None:
        """Read `nbytes` at `address` of a peer into the beginning of `target`, sleeping while it is
        on its way.

        Raises:
            WaitError: the peer is gone or too slow; `target` must not be used again.
        """
        batch = self._engine.batch_transfer_async_read(
            session, [target.data_ptr()], [address], [nbytes]
        )
        if (
            batch <= 0
        ):  # asking for the state of a batch that was never submitted crashes the process
            raise WaitError(
                f"reading {nbytes} bytes from {session} was refused at once; the peer is gone"
            )
        deadline, pause = time.monotonic() + timeout_s, 5e-5
        while (
            state := self._engine.transfer_check_status(batch)
        ) == 0 and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2e-3, pause * 1.5)
        if state != 1:
            _graveyard.append(target)
            why = "failed" if state else f"took longer than {timeout_s:g} s"
            raise WaitError(f"reading {nbytes} bytes from {session} {why}")


class MooncakeTransport(Transport):
    """Receivers pull buckets out of registered slots."""

    def __init__(
        self,
        kv_store: dist.Store,
        process: int,
        num_processes: int,
        name: str = "gyre/weights/mooncake",
        timeout_s: float = 60.0,
        staging_bytes: int = 128 << 20,
        endpoint: Endpoint | None = None,
    ) -> None:
        super().__init__(kv_store, process, num_processes, name, timeout_s, staging_bytes)
        self.endpoint = endpoint or Endpoint()
        self._slots: torch.Tensor | None = None
        self.landing = torch.empty(0, dtype=torch.uint8)
        self.outstanding: deque[tuple[int, int]] = deque()
        self.sequence = 0

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes // (_WINDOW + 1) // 4096 * 4096

    @property
    def slots(self) -> torch.Tensor:
        assert self._slots is not None
        return self._slots

    def connect_streams(self) -> None:
        self.sequence = 0
        self.outstanding.clear()
        if self._slots is None:
            self._slots = torch.empty(_WINDOW, self.bucket_bytes, dtype=torch.uint8)
            self.landing = torch.empty(self.bucket_bytes, dtype=torch.uint8)
            self.endpoint.register(self._slots)
            self.endpoint.register(self.landing)
            self.account((_WINDOW + 1) * self.bucket_bytes)
        where = _Slots(self.endpoint.session, self._slots.data_ptr())
        answers = self.rendezvous.exchange(
            "opening the swap", payload=msgspec.msgpack.encode(where)
        )
        self.peers = [_decode_slots(answer) for answer in answers]

    def outbox(self, peer: int) -> Outbox:
        return _MooncakeOutbox(self, peer)

    def inbox(self, peer: int, sizes: Sequence[int]) -> Inbox:
        return _MooncakeInbox(self, peer)

    def recover(self) -> None:
        """Fresh buffers: neither a late read nor a late write may meet the next swap."""
        if self._slots is not None:
            _graveyard.extend((self._slots, self.landing))
            self.account(-(_WINDOW + 1) * self.bucket_bytes)
        self._slots = None

    def release(self) -> None:
        if self._slots is not None:
            self.endpoint.unregister(self._slots)
            self.endpoint.unregister(self.landing)
            self.account(-(_WINDOW + 1) * self.bucket_bytes)
        self._slots = None
        self.landing = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self.release()
        self.endpoint.close()


class _MooncakeOutbox(Outbox):
    def __init__(self, transport: MooncakeTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._posted = 0

    def slot(self, nbytes: int) -> torch.Tensor:
        transport = self._transport
        if len(transport.outstanding) == _WINDOW:
            peer, number = transport.outstanding.popleft()
            key = f"taken{transport.swap}.{transport.process}-{peer}.{number}"
            transport.wait_key(key, f"waiting for process {peer} to read a bucket")
        return transport.slots[transport.sequence % _WINDOW, :nbytes]

    def post(self) -> None:
        transport = self._transport
        key = f"posted{transport.swap}.{transport.process}-{self._peer}.{self._posted}"
        transport.kv_store.set(key, str(transport.sequence % _WINDOW))
        transport.outstanding.append((self._peer, self._posted))
        transport.sequence += 1
        self._posted += 1

    def flush(self) -> None:
        """Slots outlive the stream; the vote at the end waits for the receivers."""


class _MooncakeInbox(Inbox):
    def __init__(self, transport: MooncakeTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._count = 0

    def slot(self, nbytes: int) -> torch.Tensor:
        transport = self._transport
        key = f"posted{transport.swap}.{self._peer}-{transport.process}.{self._count}"
        slot = int(transport.wait_key(key, f"waiting for a bucket of process {self._peer}"))
        peer = transport.peers[self._peer]
        address = peer.address + slot * transport.bucket_bytes
        transport.endpoint.read(
            peer.session, transport.landing, address, nbytes, transport.timeout_s
        )
        return transport.landing[:nbytes]

    def release(self) -> None:
        transport = self._transport
        transport.kv_store.set(
            f"taken{transport.swap}.{self._peer}-{transport.process}.{self._count}", "1"
        )
        self._count += 1

    def close(self) -> None:
        """The landing buffer belongs to the transport."""
