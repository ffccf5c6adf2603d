"""What every parallel layout makes of a matrix: shards of rows or of columns, and padded
vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Block, Index, LocalTensor, stack


def cut(size: int, ranks: int, rank: int, what: str) -> tuple[int, int]:
    """Start and length of a rank's part of a dimension.

    Raises:
        LayoutError: it does not divide evenly; `what` says which dimension it is.
    """
    if size % ranks:
        raise LayoutError(f"{what} of size {size} does not divide over {ranks} ranks")
    return rank * (size // ranks), size // ranks


def whole(key: str, name: str, shape: Index) -> LocalTensor:
    """The tensor itself, alike on all ranks."""
    return stack(key, shape, [Block(name, (0,) * len(shape), shape)])


def row_shard(
    key: str, parts: Sequence[tuple[str, int]], columns: int, ranks: int, rank: int
) -> LocalTensor:
    """Row shards of one or several matrices, one after the other.

    Args:
        parts: name and rows of each matrix.
    """
    cuts = [(name, *cut(size, ranks, rank, name)) for name, size in parts]
    blocks = [Block(name, (start, 0), (length, columns)) for name, start, length in cuts]
    return stack(key, (sum(length for _, _, length in cuts), columns), blocks)


def column_shard(
    key: str, name: str, num_rows: int, width: int, ranks: int, rank: int
) -> LocalTensor:
    """A column shard of a matrix of `num_rows` x `width`."""
    start, length = cut(width, ranks, rank, name)
    return stack(key, (num_rows, length), [Block(name, (0, start), (num_rows, length))])


def vocabulary(
    key: str, name: str, shape: tuple[int, int], rows_per_rank: int, rank: int, source: bool = True
) -> LocalTensor:
    """A rank's rows of an embedding or output matrix; rows beyond the vocabulary are padding.

    Args:
        shape: vocabulary and hidden size.
        source: see `LocalBox.source`.
    """
    vocab, hidden = shape
    start = min(rank * rows_per_rank, vocab)
    length = min((rank + 1) * rows_per_rank, vocab) - start
    blocks = [Block(name, (start, 0), (length, hidden))] if length else []
    padding = Block(None, (), (rows_per_rank - length, hidden))
    return stack(key, (rows_per_rank, hidden), [*blocks, padding], source)
