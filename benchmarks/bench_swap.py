"""How fast weights change their layout: against the raw rate of the wire, gather + broadcast, and
Megatron-Core.

    python benchmarks/bench_swap.py --json out.json
    python benchmarks/bench_swap.py --train-to-rollout --rollout-to-train --json out.json

Four ranks on this machine hold a Qwen3-MoE of 1.04 GB (bf16) in TP2 x PP2 x EP2 and move it into an
SGLang layout (TP4 x EP2), or into another Megatron layout where that is compared. All figures are
of the slowest rank; warm ones are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.swap import baselines, measure, models
from benchmarks.swap.ranks import run_ranks


def bench(scale: str, staging_mib: int, repeats: int) -> dict[str, Any]:
    """One rank's part; every rank returns the same summary."""
    from gyre_megatron.weights.canonical import canonical_tensors

    arch = models.architecture(scale)
    layout, tensors, chunks = models.build(arch, models.TRAIN)
    source_groups = baselines.megatron_groups()
    models.fill(tensors, 1)
    target, buffers = models.serving(arch, 4, 2)
    results = {
        kind: measure.measure(layout, tensors, target, buffers, kind, staging_mib, repeats)
        for kind in ("ipc", "collective")
    }
    verified = measure.measure(
        layout, tensors, target, buffers, "ipc", staging_mib, repeats, verify=True
    )
    gather = baselines.GatherBroadcast(layout, tensors, target, buffers, canonical_tensors(arch))
    gather.run()
    gather_seconds = measure.median(gather.run, max(2, repeats // 2))
    buffers.clear()
    megatron = compare_megatron(arch, layout, tensors, chunks, source_groups, staging_mib, repeats)
    main = results["ipc"]
    keys = (
        "seconds",
        "cold_seconds",
        "bytes_moved",
        "bytes_local",
        "bound_seconds",
        "ratio_to_bound",
        "plan_seconds",
    )
    return dict(
        **{key: main[key] for key in keys},
        gather_broadcast_seconds=gather_seconds,
        speedup_vs_gather=gather_seconds / main["seconds"],
        megatron_reshard_seconds=megatron["megatron_seconds"],
        speedup_vs_megatron=megatron["megatron_seconds"] / megatron["ipc"]["seconds"],
        peak_staging_mib=main["peak_staging_mib"],
        stages=main["stages"],
        verified_seconds=verified["seconds"],
        transports=results,
        megatron_pair=megatron,
        parameters=arch_parameters(arch),
    )


def compare_megatron(
    arch, layout, tensors, chunks, source_groups, staging_mib: int, repeats: int
) -> dict[str, Any]:
    """The same Megatron -> Megatron pair with `swap_model_weights` and with ours, and whether both
    agree."""
    import torch

    target, buffers, target_chunks = models.build(arch, models.MEGATRON_TARGET)
    chunks[0].pg_collection, target_chunks[0].pg_collection = (
        source_groups,
        baselines.megatron_groups(),
    )
    cold = measure.slowest(lambda: baselines.megatron_swap(chunks, target_chunks))
    seconds = measure.median(
        lambda: baselines.megatron_swap(chunks, target_chunks), max(2, repeats // 2)
    )
    theirs = {key: tensor.clone() for key, tensor in buffers.items()}
    ours = {
        kind: measure.measure(layout, tensors, target, buffers, kind, staging_mib, repeats)
        for kind in ("ipc", "collective")
    }
    differing = [
        key
        for key, tensor in buffers.items()
        if not torch.equal(tensor.view(torch.int16), theirs[key].view(torch.int16))
    ]
    return dict(
        pair="tp2,pp2,ep2 -> tp1,pp1,ep2",
        megatron_seconds=seconds,
        megatron_cold_seconds=cold,
        tensors_differing_from_megatron=len(differing),
        **ours,
    )


def arch_parameters(arch) -> int:
    from math import prod

    from gyre_megatron.weights.canonical import canonical_tensors

    return sum(prod(shape) for shape in canonical_tensors(arch).values())


def environment() -> dict[str, Any]:
    """Commit, machine and versions, so that a figure can be read later."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    packages = {name: version(name) for name in ("torch", "megatron-core", "sglang")}
    return dict(
        commit=commit,
        cpu=model,
        cores=os.cpu_count(),
        python=platform.python_version(),
        versions=packages,
        date=time.strftime("%Y-%m-%d"),
    )


def table(result: dict[str, Any]) -> str:
    """The headline figures as text."""
    rows = [("", "seconds", "bound", "ratio", "GB moved")]
    for kind, r in result["transports"].items():
        rows.append(
            (
                kind,
                f"{r['seconds']:.3f}",
                f"{r['bound_seconds']:.3f}",
                f"{r['ratio_to_bound']:.2f}",
                f"{r['bytes_moved'] / 1e9:.2f}",
            )
        )
    rows.append(("gather + broadcast", f"{result['gather_broadcast_seconds']:.3f}", "", "", ""))
    pair = result["megatron_pair"]
    rows.append(("megatron reshard", f"{pair['megatron_seconds']:.3f}", "", "", ""))
    rows.append(
        (
            "  ours, same pair",
            f"{pair['ipc']['seconds']:.3f}",
            f"{pair['ipc']['bound_seconds']:.3f}",
            f"{pair['ipc']['ratio_to_bound']:.2f}",
            f"{pair['ipc']['bytes_moved'] / 1e9:.2f}",
        )
    )
    return "\n".join("{:<20}{:>10}{:>10}{:>8}{:>10}".format(*row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--scale", choices=("1g", "small"), default="1g")
    parser.add_argument("--staging-mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--train-to-rollout", action="store_true", help="time a cell's way into serving, whole"
    )
    parser.add_argument(
        "--rollout-to-train", action="store_true", help="time a cell's way into training, whole"
    )
    options = parser.parse_args()
    if options.train_to_rollout or options.rollout_to_train:
        from benchmarks.swap.transitions import transitions

        result = transitions(options.scale, options.train_to_rollout, options.rollout_to_train)
        print(json.dumps(result, indent=1))
    else:
        result = run_ranks(
            bench, models.NUM_RANKS, options.scale, options.staging_mib, options.repeats
        )[0]
        print(table(result))
    if options.json:
        options.json.write_text(json.dumps({**result, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
