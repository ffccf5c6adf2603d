"""Block tables of a tree mask: at 1M tokens against writing their bytes, at 32K against
FlexAttention's own."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import common
from benchmarks.tree.workload import coding_execution, nodes_of
from gyre_megatron.ops.tree_block_mask import subtree_end_of_tokens, tree_block_tables
from gyre_megatron.trajectory.packing import pack

CALLS_PER_RUN = 5  # a table takes milliseconds: one run is the mean of a few calls


def bench_mask(num_runs: int, *, with_flex: bool) -> dict[str, Any]:
    """Milliseconds of making the tables FlexAttention reads."""
    return _million(num_runs) | _against_flex(num_runs, with_flex)


def _million(num_runs: int) -> dict[str, Any]:
    builder = coding_execution(3_600, segments=5, sub_agents=8)
    (bin_,) = pack([builder.build(None)], 1 << 21, 1)
    nodes, num_tokens = torch.from_numpy(nodes_of(bin_)), bin_.num_tokens
    tables = tree_block_tables(nodes, num_tokens)
    pairs = list(zip(tables[::2], tables[1::2], strict=True))
    entries = sum(int(counts.sum()) + counts.numel() for counts, _ in pairs)
    scratch = torch.zeros(sum(t.untyped_storage().nbytes() // 4 for t in tables), dtype=torch.int32)
    # The floor: as many bytes written once into rows of the same tables (every row at its mean
    # length); and, for comparison, into one contiguous buffer, which no block table is.
    shapes = [
        (table.shape[2], table.stride(2), -(-int(n.sum()) // n.numel())) for n, table in pairs
    ]
    rows = [torch.zeros(r, width, dtype=torch.int32)[:, :mean] for r, width, mean in shapes]
    contiguous = torch.zeros(entries, dtype=torch.int32)
    del tables, pairs
    milliseconds = common.interleaved(
        {
            "own": lambda: _ms(lambda: tree_block_tables(nodes, num_tokens, scratch=scratch)),
            "fresh": lambda: _ms(lambda: tree_block_tables(nodes, num_tokens)),
            "floor": lambda: _ms(lambda: [row.fill_(1) for row in rows]),
            "contiguous": lambda: _ms(lambda: contiguous.fill_(1)),
        },
        num_runs,
    )
    return {
        "tokens": num_tokens,
        "nodes": nodes.shape[1],
        "mib": entries * 4 / 2**20,
        "ms_1m_tokens": common.spread(milliseconds["own"]),
        "ms_1m_tokens_fresh_memory": common.spread(milliseconds["fresh"]),
        "floor_ms_1m_tokens": common.spread(milliseconds["floor"]),
        "contiguous_floor_ms_1m_tokens": common.spread(milliseconds["contiguous"]),
        "vs_floor": common.ratio(milliseconds["own"], milliseconds["floor"]),
    }


def _against_flex(num_runs: int, with_flex: bool) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    (bin_,) = pack([coding_execution(400, segments=2).build(None)], 1 << 16, 1)
    nodes, length = torch.from_numpy(nodes_of(bin_)), bin_.num_tokens
    own = common.interleaved(
        {"own": lambda: _ms(lambda: tree_block_tables(nodes, length))}, num_runs
    )["own"]
    figures: dict[str, Any] = {"tokens_32k": length, "ms_32k": common.spread(own)}
    if with_flex:
        until = subtree_end_of_tokens(nodes, length)

        def flex() -> None:
            create_block_mask(
                lambda b, h, q, k: (k <= q) & (q < until[k]),
                None,
                None,
                length,
                length,
                device="cpu",
            )

        # Once: it takes seconds and 11 GB, and is five orders of magnitude away.
        figures["flex_ms_32k_once"] = 1e3 * common.seconds_of(flex)
    return figures


def _ms(action) -> float:
    def calls() -> None:
        for _ in range(CALLS_PER_RUN):
            action()

    return 1e3 * common.seconds_of(calls) / CALLS_PER_RUN
