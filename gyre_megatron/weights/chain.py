"""Weights across cells: the same training shard, position to position, down the chain of cells in
chunks.

Every rank receives its shard once and sends it once, whatever the number of cells, so each network
port carries one shard. While chunk c is on its way to the next cell, chunk c + 1 arrives from the
one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.process_groups import CrossCellGroups


def chain_broadcast(
    buffers: Sequence[torch.Tensor],
    groups: CrossCellGroups,
    prefix: int,
    chunk_bytes: int = 32 << 20,
    timeout_s: float = 120.0,
) -> int:
    """Overwrite `buffers` in cells 1..prefix-1 with those of cell 0; collective over the prefix at
    each position.

    Args:
        buffers: contiguous tensors, the same number, shapes and dtypes at this position of every
            cell.
        chunk_bytes: size of the pieces that are forwarded.

    Returns:
        Bytes received (by the core: sent).

    Raises:
        TransferError: a neighbour failed or hung; this cell's buffers may be partly overwritten and
        must not be
            published.
    """
    if prefix == 1:
        return 0
    group, cell = groups.group(prefix), groups.cell
    sending: list[dist.Work] = []
    total = 0
    for chunk in _chunks(buffers, chunk_bytes):
        if cell > 0:
            _wait(group.recv([chunk], cell - 1, 0), f"receiving from cell {cell - 1}", timeout_s)
        if cell < prefix - 1:
            sending.append(group.send([chunk], cell + 1, 0))
            if len(sending) > 2:  # bound what is in flight
                _wait(sending.pop(0), f"sending to cell {cell + 1}", timeout_s)
        total += chunk.numel()
    for work in sending:
        _wait(work, f"sending to cell {cell + 1}", timeout_s)
    return total


def _chunks(buffers: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[torch.Tensor]:
    for buffer in buffers:
        if not buffer.is_contiguous():
            raise TransferError(
                f"a buffer of shape {tuple(buffer.shape)} is not contiguous; pass flat parameter "
                "buffers"
            )
        yield from buffer.detach().view(-1).view(torch.uint8).split(chunk_bytes)


def _wait(work: dist.Work, what: str, timeout_s: float) -> None:
    try:
        work.wait() if torch.cuda.is_available() else work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransferError(f"chain of cells: {what} failed: {error}") from error
