"""What packing trees gains: training time and memory against flattened trajectories, mask and
attention rates.

    python benchmarks/bench_tree.py --json out.json

One thread, fp32. Flattened and tree runs alternate in one process; times are medians. Efficiency is
the measured speed-up over the ideal one, which counts multiplications: matrix products per token,
attention per visible pair, the vocabulary per loss edge.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.tree.workload import coding_execution, flattened, nodes_of
from gyre_megatron.config.model import Architecture
from gyre_megatron.trajectory.packing import PackedBin, pack

HEADS, KV_HEADS, HEAD = 4, 2, 64
MODEL = Architecture(
    family="qwen3",
    vocab_size=1024,
    hidden_size=256,
    num_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD,
    intermediate_size=768,
    tie_word_embeddings=False,
)
BUDGET = 1 << 16


def operations(bins: list[PackedBin]) -> float:
    """Multiply-adds of a forward and backward pass."""
    a = MODEL
    attention = a.num_attention_heads * a.head_dim
    linear = a.hidden_size * (
        2 * attention + 2 * a.num_key_value_heads * a.head_dim + 3 * a.intermediate_size
    )
    tokens, pairs, edges = (sum(f(b) for b in bins) for f in (_tokens, _pairs, _edges))
    layers = a.num_layers * (
        3 * linear * tokens + 7 * attention * pairs
    )  # forward 2, backward 5 products per pair
    return (
        layers + 4 * a.hidden_size * a.vocab_size * edges
    )  # logits are computed again in the backward pass


def _tokens(b: PackedBin) -> int:
    return b.num_tokens


def _pairs(b: PackedBin) -> int:
    return b.num_pairs


def _edges(b: PackedBin) -> int:
    return len(b.edge_labels)


def make_trainer():
    """A single-rank trainer with random weights."""
    import torch.distributed as dist

    from gyre_megatron.config.training import TrainingConfig
    from gyre_megatron.training import Trainer

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Trainer(TrainingConfig(token_budget=BUDGET), MODEL, with_optimizer=False)


def forward_backward(trainer, bins: list[PackedBin]) -> tuple[float, float]:
    """(seconds, loss) of one micro-step on the bins."""
    trainer.begin_batch(0)
    start = time.perf_counter()
    loss = trainer.micro_step(bins)["loss"]
    return time.perf_counter() - start, loss


def peak_mib(bins: list[PackedBin]) -> float:
    """Peak of resident memory that a step adds, in a process of its own."""

    def run(pipe) -> None:
        trainer = make_trainer()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        forward_backward(trainer, bins)
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    if not mine.poll(300):
        process.kill()
        raise TimeoutError("the memory measurement did not finish in 300 s")
    process.join()
    return mine.recv()


def bench_training(scale: int, repeats: int) -> dict[str, Any]:
    """Five trajectories of one execution: packed as a tree, and flattened into the same budget."""
    tree = coding_execution(scale, vocab=MODEL.vocab_size).build(5)
    packed, flat = pack([tree], BUDGET, 1), flattened(tree, packed_budget(tree))
    peaks = {"peak_mib_flat": peak_mib(flat), "peak_mib_tree": peak_mib(packed)}
    trainer = make_trainer()
    times: dict[str, list[float]] = {"flat": [], "tree": []}
    losses = {}
    for _ in range(repeats + 1):
        for name, bins in (("flat", flat), ("tree", packed)):
            seconds, losses[name] = forward_backward(trainer, bins)
            times[name].append(seconds)
    seconds_flat, seconds_tree = (statistics.median(times[n][1:]) for n in ("flat", "tree"))
    ideal = operations(flat) / operations(packed)
    tokens_flat, tokens_tree = sum(map(_tokens, flat)), sum(map(_tokens, packed))
    return dict(
        num_trajectories=len(tree.trajectories),
        tokens_flat=tokens_flat,
        tokens_tree=tokens_tree,
        token_ratio=tokens_flat / tokens_tree,
        seconds_flat=seconds_flat,
        seconds_tree=seconds_tree,
        speedup=seconds_flat / seconds_tree,
        ideal_speedup=ideal,
        efficiency=seconds_flat / seconds_tree / ideal,
        loss_difference=abs(losses["flat"] - losses["tree"]),
        seconds_flat_all=times["flat"],
        seconds_tree_all=times["tree"],
        **peaks,
        bins_flat=len(flat),
        bins_tree=len(packed),
    )


def packed_budget(tree) -> int:
    """The budget both forms get: the tree's own unique tokens, so that memory is compared
    fairly."""
    return pack([tree], BUDGET, 1)[0].num_tokens


def bench_caps(scale: int, repeats: int) -> dict[str, Any]:
    """Forward-backward time with at most 1 and 5 trajectories against all of them."""
    builder = coding_execution(scale, vocab=MODEL.vocab_size, segments=3, sub_agents=3)
    trainer, rows = make_trainer(), {}
    caps = {"1": 1, "5": 5, "uncapped": None}
    bins = {name: pack([builder.build(cap)], BUDGET, 1) for name, cap in caps.items()}
    times: dict[str, list[float]] = {name: [] for name in caps}
    for _ in range(repeats + 1):
        for name in caps:
            times[name].append(forward_backward(trainer, bins[name])[0])
    whole = statistics.median(times["uncapped"][1:])
    for name in caps:
        seconds = statistics.median(times[name][1:])
        trajectories = sum(len(b.trajectory_advantages) for b in bins[name])
        tokens = sum(map(_tokens, bins[name]))
        rows[name] = dict(
            trajectories=trajectories,
            tokens=tokens,
            seconds=seconds,
            share_of_uncapped=seconds / whole,
        )
    return {"trajectory_caps": rows}


def bench_attention(scale: int, repeats: int) -> dict[str, Any]:
    """The kernel against SDPA on the same causal work, and against SDPA with a dense mask."""
    import torch.nn.functional as F

    from gyre_megatron.ops.tree_attention import tree_attention, tree_pieces, visibility

    def timed(function, length: int) -> float:
        query, key, value = (
            torch.randn(h, length, HEAD, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        start = time.perf_counter()
        function(query, key, value).sum().backward()
        return time.perf_counter() - start

    def causal(q, k, v):
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )

    (bin_,) = pack([coding_execution(scale).build(5)], BUDGET, 1)
    pieces = torch.from_numpy(tree_pieces(*nodes_of(bin_)))
    same_work = int((2 * bin_.num_pairs) ** 0.5)
    (small,) = pack([coding_execution(max(8, scale // 4)).build(5)], BUDGET, 1)
    visible = visibility(*nodes_of(small), small.num_tokens)
    small_pieces = torch.from_numpy(tree_pieces(*nodes_of(small)))

    def dense(q, k, v):
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, enable_gqa=True
        )

    runs = {
        "tree": lambda: timed(lambda q, k, v: tree_attention(q, k, v, pieces), bin_.num_tokens),
        "sdpa": lambda: timed(causal, same_work),
        "small_tree": lambda: timed(
            lambda q, k, v: tree_attention(q, k, v, small_pieces), small.num_tokens
        ),
        "small_dense": lambda: timed(dense, small.num_tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            times[name].append(run())
    best = {name: min(t[1:]) for name, t in times.items()}
    flops = 14 * HEADS * HEAD
    rate_tree = flops * bin_.num_pairs / best["tree"]
    rate_sdpa = flops * (same_work * (same_work + 1) // 2) / best["sdpa"]
    return dict(
        attention_tokens=bin_.num_tokens,
        attention_gflops=rate_tree / 1e9,
        sdpa_gflops=rate_sdpa / 1e9,
        attention_vs_sdpa=rate_tree / rate_sdpa,
        dense_mask_tokens=small.num_tokens,
        attention_vs_dense_mask=best["small_dense"] / best["small_tree"],
        attention_pieces=len(pieces),
    )


def bench_mask(repeats: int, with_flex: bool) -> dict[str, Any]:
    """Our block tables at 1M tokens against writing their bytes once; at 32K against
    FlexAttention's own."""
    from torch.nn.attention.flex_attention import create_block_mask

    from gyre_megatron.ops.tree_block_mask import subtree_end_of_tokens, tree_block_tables

    def million():
        b = coding_execution(3_600, segments=5, sub_agents=8)
        (bin_,) = pack([b.build(None)], 1 << 21, 1)
        return torch.from_numpy(nodes_of(bin_)), bin_.num_tokens

    def median_ms(function) -> float:
        times = []
        for _ in range(5 * repeats + 1):
            start = time.perf_counter()
            kept = function()
            times.append(time.perf_counter() - start)
            del kept
        return 1e3 * statistics.median(times[1:])

    nodes, num_tokens = million()
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
    own = median_ms(lambda: tree_block_tables(nodes, num_tokens, scratch=scratch))
    floor = median_ms(lambda: [row.fill_(1) for row in rows])
    results = dict(
        mask_tokens=num_tokens,
        mask_nodes=nodes.shape[1],
        mask_mib=entries * 4 / 2**20,
        mask_ms_1m_tokens=own,
        mask_floor_ms_1m_tokens=floor,
        mask_vs_floor=own / floor,
        mask_contiguous_floor_ms_1m_tokens=median_ms(lambda: contiguous.fill_(1)),
        mask_ms_1m_tokens_fresh_memory=median_ms(lambda: tree_block_tables(nodes, num_tokens)),
    )
    (bin_,) = pack([coding_execution(400, segments=2).build(None)], 1 << 16, 1)
    small, length = torch.from_numpy(nodes_of(bin_)), bin_.num_tokens
    results |= dict(
        mask_tokens_32k=length, own_mask_ms_32k=median_ms(lambda: tree_block_tables(small, length))
    )
    if with_flex:
        until = subtree_end_of_tokens(small, length)
        start = time.perf_counter()
        create_block_mask(
            lambda b, h, q, k: (k <= q) & (q < until[k]), None, None, length, length, device="cpu"
        )
        flex = 1e3 * (time.perf_counter() - start)
        results |= dict(flex_mask_ms_32k=flex, mask_speedup_32k=flex / results["own_mask_ms_32k"])
    return results


def provenance() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    names = ("torch", "megatron-core")
    return dict(
        commit=commit,
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {cpu_model()}",
        threads="1",
        **{n: version(n) for n in names},
    )


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--scale",
        type=int,
        default=330,
        help="tokens of a tool result; 330 gives 20K unique tokens",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["training", "caps", "attention", "mask"])
    parser.add_argument(
        "--no-flex",
        action="store_true",
        help="skip create_block_mask at 32K (about 11 GB of memory)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "training": lambda: bench_training(arguments.scale, arguments.repeats),
        "caps": lambda: bench_caps(arguments.scale // 3, arguments.repeats),
        "attention": lambda: bench_attention(arguments.scale, arguments.repeats),
        "mask": lambda: bench_mask(arguments.repeats, not arguments.no_flex),
    }
    results: dict[str, Any] = {}
    for name in arguments.parts:
        results |= parts[name]()
    for key, value in results.items():
        print(f"{key:28} {value:.4g}" if isinstance(value, float) else f"{key:28} {value}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps(results | {"provenance": provenance()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
