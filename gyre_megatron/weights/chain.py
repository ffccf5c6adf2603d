"""Weights across cells: the same training shard, position to position, down the chain of cells.

Every rank receives its shard once and sends it once, whatever the number of cells, so each network
port carries one shard. While one bucket is on its way to the next cell, another arrives from the
one before. The buckets are those of the configured transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.delta_chain import DeltaChain, Versions
from gyre_megatron.weights.process_groups import CellTopology
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.streams import TRAILER, check, seal
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport
from gyre_megatron.weights.transports.choose import open_transport


class CellChain:
    """The cells as seen from one position inside them, and the transports between them.

    A transport is opened when a set of cells moves weights together for the first time. Between
    moves it holds no staging memory.

    Args:
        config: transport, staging memory, time limit and verification.
        kv_store: reached by all ranks of the job.
        topology: cells of the job.
        rank: this rank of the job.
        device: where the weights live.
    """

    def __init__(
        self,
        config: WeightsConfig,
        kv_store: dist.Store,
        topology: CellTopology,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._kv_store = kv_store
        self._device = device
        self.cell = topology.cell_of(rank)
        self._position = topology.position_of(rank)
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._deltas: dict[tuple[int, ...], DeltaChain] = {}

    def take_core_weights(
        self,
        buffers: Sequence[torch.Tensor],
        cells: Sequence[int],
        versions: Versions | None = None,
    ) -> int:
        """Overwrite `buffers` in `cells` with those of the core, cell 0; called by the core and by
        each of them, at every position. Cells that are left out take no part and are not held up.

        Args:
            buffers: contiguous tensors, the same number, shapes and dtypes at this position of
                every cell.
            cells: in the order in which they pass the weights on.
            versions: of this process's buffers; with `weights.delta` all give them, and only what
                changed is sent.

        Returns:
            Bytes received (by the core: sent).

        Raises:
            TransferError: a cell failed or hung; buffers may be partly overwritten and must not be
                published.
        """
        if not cells:
            return 0
        chain = (0, *cells)
        try:
            transport = self._transport(chain)
            try:
                if versions is None or not self._config.delta:
                    return chain_broadcast(buffers, transport, self._config.verify)
                return self._send_changes(buffers, chain, transport, versions)
            finally:
                transport.release()
        except TransferError as error:
            raise TransferError(
                f"chain of cells {list(chain)} at position {self._position}, whose processes are "
                f"numbered in this order: {error}"
            ) from error

    def _send_changes(
        self,
        buffers: Sequence[torch.Tensor],
        chain: tuple[int, ...],
        transport: Transport,
        versions: Versions,
    ) -> int:
        changes = self._changes(chain)
        encoded = changes.encode(buffers, versions)
        if encoded is None:
            num_bytes = chain_broadcast(buffers, transport, self._config.verify)
        else:
            announced, payload = encoded
            num_bytes = len(announced)
            if payload.numel():  # nothing may have changed
                num_bytes += chain_broadcast([payload], transport, self._config.verify)
            if self.cell != 0:
                changes.apply(announced, payload, buffers)
        if self.cell == 0:
            changes.sent(buffers, versions.wanted)
        return num_bytes

    def _changes(self, chain: tuple[int, ...]) -> DeltaChain:
        if chain not in self._deltas:
            name = f"gyre/delta{'-'.join(map(str, chain))}/position{self._position}"
            kv_store = dist.PrefixStore(name, self._kv_store)
            place = chain.index(self.cell)
            meet = Rendezvous(kv_store, place, len(chain), self._config.timeout_s)
            self._deltas[chain] = DeltaChain(meet)
        return self._deltas[chain]

    def _transport(self, chain: tuple[int, ...]) -> Transport:
        if chain not in self._transports:
            cells = "-".join(map(str, chain))
            self._transports[chain] = open_transport(
                self._config,
                self._kv_store,
                chain.index(self.cell),
                len(chain),
                f"gyre/chain{cells}/position{self._position}",
                self._device,
            )
        return self._transports[chain]


def chain_broadcast(
    buffers: Sequence[torch.Tensor], transport: Transport, verify: bool = True
) -> int:
    """Overwrite `buffers` in every process with those of process 0, each passing them on to the
    next; collective.

    Args:
        buffers: contiguous tensors, the same number, shapes and dtypes in every process.
        verify: compare a checksum of every bucket before it is installed.

    Returns:
        Bytes received (by process 0: sent).

    Raises:
        TransferError: a process failed or hung; buffers may be partly overwritten.
    """
    failure: Exception | None = None
    total = 0
    try:
        transport.begin()
        transport.connect_streams()
    except TransferError:
        transport.recover()
        raise
    try:
        total = _pass_on(buffers, transport, verify)
    except (TransferError, RuntimeError) as error:
        failure = error
        transport.break_off()
    transport.finish(failure)
    return total


class _Ends(NamedTuple):
    """The streams of one process; None at either end of the chain."""

    inbox: Inbox | None
    outbox: Outbox | None


def _pass_on(buffers: Sequence[torch.Tensor], transport: Transport, verify: bool) -> int:
    me = transport.process
    chunks = list(_chunks(buffers, transport.bucket_bytes - TRAILER))
    sizes = [chunk.numel() + TRAILER + _padding(chunk) for chunk in chunks]
    ends = _Ends(
        transport.inbox(me - 1, sizes) if me > 0 else None,
        transport.outbox(me + 1) if me + 1 < transport.num_processes else None,
    )
    for chunk, size in zip(chunks, sizes, strict=True):
        arrived = None
        if ends.inbox is not None:
            arrived = ends.inbox.slot(size)
            if verify:
                check(arrived, me - 1)
            chunk.copy_(arrived[: chunk.numel()])
        if ends.outbox is not None:
            leaving = ends.outbox.slot(size)
            if arrived is not None:
                leaving.copy_(arrived)  # with the core's checksum
            else:
                leaving[: chunk.numel()].copy_(chunk)
                leaving[chunk.numel() : size - TRAILER].zero_()
                if verify:
                    seal(leaving)
            if leaving.is_cuda or chunk.is_cuda:
                torch.cuda.current_stream().synchronize()
            ends.outbox.post()
        elif chunk.is_cuda:
            torch.cuda.current_stream().synchronize()
        if ends.inbox is not None:
            ends.inbox.release()
    if ends.outbox is not None:
        ends.outbox.flush()
    if ends.inbox is not None:
        ends.inbox.close()
    return sum(chunk.numel() for chunk in chunks)


def _chunks(buffers: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[torch.Tensor]:
    chunk_bytes = chunk_bytes // TRAILER * TRAILER
    for buffer in buffers:
        if not buffer.is_contiguous():
            raise TransferError(
                f"a buffer of shape {tuple(buffer.shape)} is not contiguous; pass flat parameter "
                "buffers"
            )
        yield from buffer.detach().view(-1).view(torch.uint8).split(chunk_bytes)


def _padding(chunk: torch.Tensor) -> int:
    """Bytes that bring a chunk to a multiple of the trailer, whose words must be aligned."""
    return -chunk.numel() % TRAILER
