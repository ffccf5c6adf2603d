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
    *,
    chain: Sequence[int] | None = None,
) -> int:
    """Overwrite `buffers` in the cells of a chain with those of cell 0; called at each position of
    every cell in it.

    Args:
        prefix: the chain lies in cells 0..prefix-1, whose group carries it.
        chain: cells in the order in which they pass the weights on, the core first; default: the
            whole prefix. Cells that are left out take no part and are not held up.
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
    chain = range(prefix) if chain is None else chain
    if len(chain) == 1:
        return 0
    group = groups.group(prefix)
    place = chain.index(groups.cell)
    before = chain[place - 1] if place > 0 else None
    after = chain[place + 1] if place + 1 < len(chain) else None
    sending: list[dist.Work] = []
    total = 0
    for chunk in _chunks(buffers, chunk_bytes):
        if before is not None:
            _wait(group.recv([chunk], before, 0), f"receiving from cell {before}", timeout_s)
        if after is not None:
            sending.append(group.send([chunk], after, 0))
            if len(sending) > 2:  # bound what is in flight
                _wait(sending.pop(0), f"sending to cell {after}", timeout_s)
        total += chunk.numel()
    for work in sending:
        _wait(work, f"sending to cell {after}", timeout_s)
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
