"""How fast a publish changes the weights' layout: against the raw rate of its transport, gather +
broadcast, and Megatron-Core.

    python benchmarks/bench_swap.py --json out.json
    python benchmarks/bench_swap.py --train-to-rollout --rollout-to-train --json out.json

Two ranks on this machine hold a Qwen3-MoE of 1.04 GB (bf16) in two pipeline stages and move it into
an SGLang layout (TP2 x EP2), or into another Megatron layout where that is compared: one busy rank
a core where there are two cores. The path and the verification are those of the main job; both
sides of a comparison use the same transport and run in turns. A figure is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.swap import baselines, measure, models
from benchmarks.swap.balance import planned_imbalance
from benchmarks.swap.ranks import run_ranks

TRANSPORTS = ("ipc", "collective")


def bench(scale: str, staging_mib: int, repeats: int) -> dict[str, Any]:
    """One rank's part; rank 0's answer is the result."""
    from gyre_megatron.weights.canonical import canonical_tensors

    arch = models.architecture(scale)
    layout, tensors, chunks = models.build(arch, models.TRAIN)
    source_groups = baselines.megatron_groups()
    models.fill(tensors, 1)
    target, buffers = models.serving(arch, models.NUM_RANKS, models.NUM_RANKS)
    gather = baselines.GatherBroadcast(layout, tensors, target, buffers, canonical_tensors(arch))
    shadow = measure.shadow_like(target)
    actions = {"gather": lambda: measure.slowest(gather.run)}
    publishes: dict[str, measure.Publish] = {}
    for kind in TRANSPORTS:
        publish = measure.Publish(
            layout,
            tensors,
            models.prefixed(target),
            shadow,
            measure.make_transport(kind, staging_mib),
        )
        bound = measure.raw_move(kind, publish.plan, measure.make_transport(kind, staging_mib))
        publishes[kind] = publish
        actions[f"{kind}"] = lambda run=publish.run: measure.slowest(run)
        actions[f"{kind} bound"] = lambda run=bound: measure.slowest(run)
        actions[f"{kind} cpu"] = lambda run=publish.run: measure.cpu_seconds(run)
        actions[f"{kind} bound cpu"] = lambda run=bound: measure.cpu_seconds(run)
    Path(shadow.window.path).unlink()  # all have mapped it
    seconds = common.interleaved(actions, repeats)
    delivered = measure.total(shadow.nbytes)
    compared = compare_megatron(arch, layout, tensors, chunks, source_groups, staging_mib, repeats)
    result: dict[str, Any] = {
        "pair": f"pp{models.NUM_RANKS} -> tp{models.NUM_RANKS}, ep{models.NUM_RANKS}",
        "gb_delivered": delivered / 1e9,
        "gather_broadcast_seconds": common.spread(seconds["gather"]),
        "speedup_vs_gather": common.ratio(seconds["gather"], seconds["collective"]),
        **compared,
        "imbalance": planned_imbalance(),
    }
    for kind in TRANSPORTS:
        result[kind] = {
            "seconds": common.spread(seconds[kind]),
            "bound_seconds": common.spread(seconds[f"{kind} bound"]),
            "ratio_to_bound": common.ratio(seconds[kind], seconds[f"{kind} bound"]),
            "copies_per_byte": measure.total(publishes[kind].passes) / 2 / delivered,
            "cpu_seconds_per_gb": _per_gb(seconds[f"{kind} cpu"], delivered),
            "bound_cpu_seconds_per_gb": _per_gb(seconds[f"{kind} bound cpu"], delivered),
        }
    for key in ("ratio_to_bound", "copies_per_byte", "cpu_seconds_per_gb"):
        result[key] = result["ipc"][key]
    return result


def compare_megatron(
    arch, layout, tensors, chunks, source_groups, staging_mib: int, repeats: int
) -> dict[str, Any]:
    """The same Megatron -> Megatron pair with `swap_model_weights` over gloo and with ours over
    gloo, checksums included, and whether both agree."""
    import torch
    import torch.distributed as dist

    from gyre_megatron.weights import Resharder, plan_rank

    target, buffers, target_chunks = models.build(arch, models.MEGATRON_TARGET)
    chunks[0].pg_collection = source_groups
    target_chunks[0].pg_collection = baselines.megatron_groups()
    ours = Resharder(
        plan_rank(layout, target, dist.get_rank()),
        tensors,
        buffers,
        measure.make_transport("collective", staging_mib),
        lambda _: measure.WIRE,
        verify=True,
    )
    baselines.megatron_swap(chunks, target_chunks)
    theirs = {key: tensor.clone() for key, tensor in buffers.items()}
    for tensor in buffers.values():
        tensor.zero_()
    ours.run()
    differing = [
        key
        for key, tensor in buffers.items()
        if not torch.equal(tensor.view(torch.int16), theirs[key].view(torch.int16))
    ]
    seconds = common.interleaved(
        {
            "megatron": lambda: measure.slowest(
                lambda: baselines.megatron_swap(chunks, target_chunks)
            ),
            "ours": lambda: measure.slowest(ours.run),
        },
        repeats,
    )
    return {
        "megatron_pair": models.MEGATRON_PAIR,
        "megatron_seconds": common.spread(seconds["megatron"]),
        "same_pair_seconds": common.spread(seconds["ours"]),
        "speedup_vs_megatron": common.ratio(seconds["megatron"], seconds["ours"]),
        "tensors_differing_from_megatron": int(measure.total(len(differing))),
    }


def _per_gb(seconds: list[float], delivered: float) -> dict[str, float]:
    return common.spread(one * 1e9 / delivered for one in seconds)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--scale", choices=("1g", "small"), default="1g")
    parser.add_argument("--staging-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7, help="rounds; figures need 7")
    parser.add_argument(
        "--train-to-rollout", action="store_true", help="time a cell's way into serving, whole"
    )
    parser.add_argument(
        "--rollout-to-train", action="store_true", help="time a cell's way into training, whole"
    )
    options = parser.parse_args()
    record = common.environment()
    if options.train_to_rollout or options.rollout_to_train:
        from benchmarks.swap.transitions import transitions

        figures = transitions(options.scale, options.train_to_rollout, options.rollout_to_train)
        print(json.dumps(figures, indent=1))
    else:
        figures = run_ranks(
            bench, models.NUM_RANKS, options.scale, options.staging_mib, options.repeats
        )[0]
        common.show(figures)
    if options.json:
        common.write_results(options.json, record, vars(options), figures)


if __name__ == "__main__":
    main()
