"""Training time and memory of a packed tree against its flattened trajectories, and the bound.

`bound_seconds` is what the tree's counts of tokens, visible pairs and loss edges cost at the best
rates this trainer reached in the same run on bins without tree structure (and, for pairs, on a
single fork, whose attention is a full rectangle). A tree can do no better than that, so
`efficiency` = bound over measured stays below 1; `ideal_speedup` is flat over the bound.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.tree.workload import Builder, coding_execution, flattened
from gyre_megatron.config.model import Architecture
from gyre_megatron.trajectory.packing import PackedBin, pack

MODEL = Architecture(
    family="qwen3",
    vocab_size=1024,
    hidden_size=256,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=768,
    tie_word_embeddings=False,
)
BUDGET = 1 << 16
PROBE_LENGTH = 256  # chains this short have next to no pairs: their time is the tokens'


@dataclass(frozen=True)
class Counts:
    """What the time of a list of bins depends on."""

    tokens: int
    pairs: int
    edges: int

    @classmethod
    def of(cls, bins: list[PackedBin]) -> Counts:
        """Sums over bins."""
        return cls(
            sum(b.num_tokens for b in bins),
            sum(b.num_pairs for b in bins),
            sum(len(b.edge_labels) for b in bins),
        )


@dataclass(frozen=True)
class Timing:
    """One micro-step."""

    cpu_seconds: float
    wall_seconds: float
    loss: float


def make_trainer():
    """A single-rank trainer with random weights."""
    import torch.distributed as dist

    from gyre_megatron.config.training import TrainingConfig
    from gyre_megatron.cpu import enable_cpu
    from gyre_megatron.training import Trainer

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        enable_cpu()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Trainer(TrainingConfig(token_budget=BUDGET), MODEL, with_optimizer=False)


def micro_step(trainer, bins: list[PackedBin]) -> Timing:
    """Forward and backward on the bins."""
    trainer.begin_batch(0)
    wall = time.perf_counter()
    cpu = time.process_time()
    loss = trainer.micro_step(bins)["loss"]
    return Timing(time.process_time() - cpu, time.perf_counter() - wall, loss)


def in_turns(
    trainer, batches: dict[str, list[PackedBin]], num_runs: int
) -> dict[str, list[Timing]]:
    """`num_runs` micro-steps of each batch, interleaved."""
    timings: dict[str, list[Timing]] = {name: [] for name in batches}

    def run(name: str) -> float:
        timings[name].append(micro_step(trainer, batches[name]))
        return timings[name][-1].cpu_seconds

    # A small step first: caches and allocator warm up on it instead of on a whole round.
    micro_step(trainer, _chains([PROBE_LENGTH] * 8, 1))
    actions = {name: lambda name=name: run(name) for name in batches}
    common.interleaved(actions, num_runs, num_warmups=0)
    return timings


def bench_training(scale: int, num_runs: int) -> dict[str, Any]:
    """Five trajectories of one execution: packed as a tree, and flattened into the same budget."""
    tree = coding_execution(scale, vocab=MODEL.vocab_size).build(5)
    packed = pack([tree], BUDGET, 1)
    # Flattened bins get as many tokens as the tree has unique ones: memory is compared fairly.
    flat = flattened(tree, packed[0].num_tokens)
    peaks = {"peak_mib_flat": peak_mib(flat), "peak_mib_tree": peak_mib(packed)}
    plain = probes(Counts.of(packed).tokens)
    timings = in_turns(make_trainer(), {"flat": flat, "tree": packed, **plain}, num_runs)
    cpu = {name: [t.cpu_seconds for t in runs] for name, runs in timings.items()}
    rates = best_rates(plain, {name: min(runs) for name, runs in cpu.items()})
    bound = at_best(Counts.of(packed), rates)
    flat_counts, tree_counts = Counts.of(flat), Counts.of(packed)
    losses = [timings[name][0].loss for name in ("flat", "tree")]
    return {
        "workloads": {
            "one_execution": {
                "num_trajectories": len(tree.trajectories),
                "tokens_flat": flat_counts.tokens,
                "tokens_tree": tree_counts.tokens,
                "token_ratio": flat_counts.tokens / tree_counts.tokens,
                "pair_ratio": flat_counts.pairs / tree_counts.pairs,
                "speedup": common.ratio(cpu["flat"], cpu["tree"]),
                "speedup_wall": common.ratio(*(_wall(timings[n]) for n in ("flat", "tree"))),
                "ideal": common.spread(seconds / bound for seconds in cpu["flat"]),
                "efficiency": common.spread(bound / seconds for seconds in cpu["tree"]),
                "bound_seconds": bound,
                "best_rates": rates,
                "loss_difference": abs(losses[0] - losses[1]),
                "bins_flat": len(flat),
                "bins_tree": len(packed),
                **peaks,
            }
        },
        "seconds": {name: common.spread(runs) for name, runs in cpu.items()},
    }


def bench_caps(scale: int, num_runs: int) -> dict[str, Any]:
    """Forward-backward time with at most 1 and 5 trajectories against all of them."""
    builder = coding_execution(scale, vocab=MODEL.vocab_size, segments=3, sub_agents=3)
    caps = {"1": 1, "5": 5, "uncapped": None}
    bins = {name: pack([builder.build(cap)], BUDGET, 1) for name, cap in caps.items()}
    timings = in_turns(make_trainer(), bins, num_runs)
    cpu = {name: [t.cpu_seconds for t in runs] for name, runs in timings.items()}
    return {
        name: {
            "trajectories": sum(len(b.trajectory_advantages) for b in bins[name]),
            "tokens": Counts.of(bins[name]).tokens,
            "seconds": common.spread(cpu[name]),
            "share_of_uncapped": common.ratio(cpu[name], cpu["uncapped"]),
        }
        for name in caps
    }


def peak_mib(bins: list[PackedBin]) -> float:
    """Peak of resident memory that a step adds, in a process of its own."""

    def run(pipe) -> None:
        trainer = make_trainer()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        micro_step(trainer, bins)
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    if not mine.poll(600):
        process.kill()
        raise TimeoutError("the memory measurement did not finish in 600 s")
    process.join()
    return mine.recv()


def probes(num_tokens: int) -> dict[str, list[PackedBin]]:
    """Bins that separate the cost of a token, of a pair and of an edge."""
    count = num_tokens // PROBE_LENGTH
    fork = Builder(0, MODEL.vocab_size)
    trunk = fork.node(-1, num_tokens // 2, sampled=False)
    # A one-token first child makes the second one see the trunk through a rectangle, without the
    # half-empty diagonal blocks of a causal square.
    fork.leaf(fork.node(trunk, 1, sampled=True), "main")
    rest = fork.node(trunk, num_tokens - num_tokens // 2 - 2, sampled=False)
    fork.leaf(fork.node(rest, 1, sampled=True), "main")
    return {
        "probe_tokens": _chains([PROBE_LENGTH] * count, 1),
        "probe_edges": _chains([PROBE_LENGTH] * count, PROBE_LENGTH // 2),
        "probe_chain": _chains([num_tokens], 1),
        "probe_fork": pack([fork.build(None)], BUDGET, 1),
    }


def _chains(lengths: list[int], num_trained: int) -> list[PackedBin]:
    """One bin of sequences without branches; the last `num_trained` tokens of each are trained."""
    builder = Builder(0, MODEL.vocab_size)
    for length in lengths:
        context = builder.node(-1, length - num_trained, sampled=False)
        builder.leaf(builder.node(context, num_trained, sampled=True), "main")
    return pack([builder.build(None)], BUDGET, 1)


def best_rates(
    probes: dict[str, list[PackedBin]], best_seconds: dict[str, float]
) -> dict[str, float]:
    """Least seconds per token, pair and edge that the probes show.

    Two probes give the costs of tokens and edges, and either of the long ones that of pairs: the
    cheaper one counts.
    """
    counts = {name: Counts.of(bins) for name, bins in probes.items()}
    found = []
    for long_probe in ("probe_chain", "probe_fork"):
        names = ("probe_tokens", "probe_edges", long_probe)
        amounts = np.array([dataclasses.astuple(counts[name]) for name in names], float)
        found.append(np.linalg.solve(amounts, [best_seconds[name] for name in names]))
    # Noise can make the dearer probe look cheaper; a cost is never negative.
    token, pair, edge = np.maximum(min(found, key=lambda costs: costs[1]), 0.0).tolist()
    return {"token": token, "pair": pair, "edge": edge}


def at_best(counts: Counts, rates: dict[str, float]) -> float:
    return (
        counts.tokens * rates["token"] + counts.pairs * rates["pair"] + counts.edges * rates["edge"]
    )


def _wall(timings: list[Timing]) -> list[float]:
    return [timing.wall_seconds for timing in timings]
