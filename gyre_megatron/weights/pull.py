"""A joiner takes the core's weights without the core's help.

While a batch is in progress the core's weights do not change (`scheduler.decide` finishes no step
while a cell takes weights), so a cell that joins reads them where they lie, and the core goes on
with its micro-steps. On one host it reads the core's memory as mapped files (CPU) or by CUDA IPC
(GPU), between hosts by Mooncake's one-sided reads where that is the configured transport. Where none
of these reaches the core, `CoreReader.find` says so, and the chain of cells is used, in which the
core takes part.

Invariant: beside the weights lies a stamp with their version, -1 while they are being written. It
is read before and after them, so nobody goes on with weights that changed meanwhile.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler

import msgspec
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.network import local_address
from gyre_megatron.weights.shared_memory import host_identity
from gyre_megatron.weights.transports.mooncake import Endpoint

_READ_BYTES = 64 << 20
_BEING_WRITTEN = -1


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """One buffer of the core, as its host sees it.

    Attributes:
        file: the core's open descriptor of the memory.
        inode: of the file behind it, so that another process's descriptor is not taken for it.
        file_bytes: size of the whole file.
        offset, num_bytes: where the buffer lies in it.
    """

    file: str
    inode: int
    file_bytes: int
    offset: int
    num_bytes: int


class _Offer(msgspec.Struct, frozen=True):
    """What the core says of its weights; a way that it does not offer is empty."""

    host: str
    sizes: list[int]
    memory: list[_Memory] = []
    cuda: bytes = b""
    session: str = ""
    addresses: list[int] = []


class CoreWeights:
    """The core's end: keeps its buffers readable from outside for as long as it lives.

    Args:
        buffers: contiguous tensors, for the life of the trainer; on a CPU their memory moves into
            shared memory, in place.
        kv_store: reached by all ranks of the job.
        position: this rank's position in its cell.
        version: of the weights now.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        config: WeightsConfig,
        kv_store: dist.Store,
        position: int,
        version: int,
    ) -> None:
        self._stamp = torch.full((1,), version, dtype=torch.int64, device=buffers[0].device)
        self._buffers = [self._stamp, *buffers]
        sizes = [_num_bytes(buffer) for buffer in self._buffers]
        offer = _Offer(host_identity(), sizes)
        if config.transport == "mooncake":
            self._endpoint = _endpoint(config, kv_store)
            for buffer in self._buffers:
                self._endpoint.register(buffer)
            addresses = [buffer.data_ptr() for buffer in self._buffers]
            offer = _Offer(
                host_identity(), sizes, session=self._endpoint.session, addresses=addresses
            )
        elif all(buffer.is_cuda for buffer in self._buffers):
            offer = _Offer(host_identity(), sizes, cuda=bytes(ForkingPickler.dumps(self._buffers)))
        elif not any(buffer.is_cuda for buffer in self._buffers):
            offer = _Offer(
                host_identity(), sizes, memory=[_share(buffer) for buffer in self._buffers]
            )
        self._places = [buffer.data_ptr() for buffer in self._buffers]
        kv_store.set(_key(position), base64.b64encode(msgspec.msgpack.encode(offer)).decode())

    def begin_writing(self) -> None:
        """The weights are about to change."""
        self._stamp.fill_(_BEING_WRITTEN)

    def settle(self, version: int) -> None:
        """The weights are those of `version` and stay so until the next step.

        Raises:
            TransferError: a buffer has moved since it was offered, so that joiners would read what
                nobody updates.
        """
        self._stamp.fill_(version)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # readers are other processes: no stream of theirs waits
        if [buffer.data_ptr() for buffer in self._buffers] != self._places:
            raise TransferError(
                "the core's weights have moved in memory since they were offered to joiners; "
                "write into parameters in place instead of replacing their storage"
            )


class CoreReader:
    """A satellite's end.

    Args:
        sources: the core's buffers as this process sees them; None where Mooncake reads them.
    """

    def __init__(
        self,
        offer: _Offer,
        sources: list[torch.Tensor] | None,
        endpoint: Endpoint | None,
        timeout_s: float,
    ) -> None:
        self._offer = offer
        self._sources = sources
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._device = sources[0].device if sources else torch.device("cpu")

    @classmethod
    def find(cls, config: WeightsConfig, kv_store: dist.Store, position: int) -> CoreReader | None:
        """The way to the weights of the core's rank at the same position; None if there is none.

        Raises:
            TransferError: the core did not say anything within `weights.timeout_s`.
        """
        key = _key(position)
        try:
            kv_store.wait([key], timedelta(seconds=config.timeout_s))
        except RuntimeError as error:
            raise TransferError(
                f"the core's rank at position {position} did not offer its weights within "
                f"weights.timeout_s={config.timeout_s:g} s: {error}"
            ) from None
        offer = msgspec.msgpack.decode(base64.b64decode(kv_store.get(key)), type=_Offer)
        if offer.session:
            return cls(offer, None, _endpoint(config, kv_store), config.timeout_s)
        if offer.host != host_identity():
            return None
        if offer.cuda:
            sources = [tensor.view(-1).view(torch.uint8) for tensor in pickle.loads(offer.cuda)]
            return cls(offer, sources, None, config.timeout_s)
        mapped = [_map(memory) for memory in offer.memory]
        sources = [source for source in mapped if source is not None]
        if not mapped or len(sources) < len(mapped):
            return None
        return cls(offer, sources, None, config.timeout_s)

    def pull(self, buffers: Sequence[torch.Tensor], version: int) -> int:
        """Overwrite `buffers` with the core's; returns the bytes read.

        Args:
            buffers: contiguous, the same number and sizes as the core's.
            version: that the core holds.

        Raises:
            TransferError: sizes or version differ, or the core is gone; buffers may be partly
                overwritten and must not be used.
        """
        sizes = [_num_bytes(buffer) for buffer in buffers]
        if sizes != self._offer.sizes[1:]:
            raise TransferError(
                f"this rank holds buffers of {sizes} bytes, the core {self._offer.sizes[1:]}; "
                "cells share one training layout"
            )
        self._expect(version, "before")
        for index, buffer in enumerate(buffers, start=1):
            self._read(index, buffer.detach().view(-1).view(torch.uint8))
        self._expect(version, "after")
        return sum(sizes)

    def _expect(self, version: int, when: str) -> None:
        stamp = torch.empty(8, dtype=torch.uint8, device=self._device)
        self._read(0, stamp)
        found = int(stamp.view(torch.int64))
        if found != version:
            what = "being written" if found == _BEING_WRITTEN else f"of version {found}"
            raise TransferError(
                f"version {version} of the core's weights was to be read; {when} the read they "
                f"are {what}"
            )

    def _read(self, index: int, target: torch.Tensor) -> None:
        if self._sources is not None:
            target.copy_(self._sources[index])
            return
        assert self._endpoint is not None
        self._endpoint.register(target)
        for start in range(0, target.numel(), _READ_BYTES):
            part = target[start : start + _READ_BYTES]
            address = self._offer.addresses[index] + start
            self._endpoint.read(self._offer.session, part, address, part.numel(), self._timeout_s)


def _key(position: int) -> str:
    return f"gyre/core_weights/{position}"


def _num_bytes(buffer: torch.Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _endpoint(config: WeightsConfig, kv_store: dist.Store) -> Endpoint:
    return Endpoint(local_address(config.interface, kv_store), config.mooncake_protocol)


def _share(buffer: torch.Tensor) -> _Memory:
    """Move a CPU tensor's storage into shared memory, where every view of it follows, and say how
    other processes of this host find it. The memory has no name, so nothing can be left behind."""
    if not buffer.is_contiguous():
        raise TransferError(f"a buffer of shape {tuple(buffer.shape)} is not contiguous")
    storage = buffer.untyped_storage()
    descriptor, file_bytes = storage._share_fd_cpu_()
    offset = buffer.data_ptr() - storage.data_ptr()
    return _Memory(
        file=f"/proc/{os.getpid()}/fd/{descriptor}",
        inode=os.fstat(descriptor).st_ino,
        file_bytes=file_bytes,
        offset=offset,
        num_bytes=_num_bytes(buffer),
    )


def _map(memory: _Memory) -> torch.Tensor | None:
    """The core's buffer as uint8 [bytes], read only by convention; None if it cannot be reached
    from here (another pid namespace, another user)."""
    try:
        descriptor = os.open(memory.file, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_ino != memory.inode:
            return None
        mapping = mmap.mmap(descriptor, memory.file_bytes)
    finally:
        os.close(descriptor)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    return data[memory.offset : memory.offset + memory.num_bytes]
