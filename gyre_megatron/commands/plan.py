"""`gyre plan`: forecast a reshard without weights: bytes per rank, the bound, staging memory and
the largest tensors.

    gyre plan --config qwen3_8_2_4t_a95b --train tp4,pp4,ep64,etp1 --serve tp16,ep16
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_megatron.config.loader import load_config
from gyre_megatron.errors import ConfigError, LayoutError, PlanError

_UNPRINTED = ("largest_tensors", "ranks_planned")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = _forecast(options)
    except (LayoutError, PlanError) as error:
        raise ConfigError(f"{error}") from None  # both come from the words of the command line
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def _forecast(options: argparse.Namespace) -> dict[str, Any]:
    architecture = load_config(options.config, partial=True).config.model.shape()
    # Only now: this imports torch, which a wrong word on the command line should not wait for.
    from gyre_megatron.weights.forecast import Rates, forecast, serving_layout, training_layout

    train = training_layout(architecture, options.train)
    serve = serving_layout(architecture, options.serve)
    given = dict(network=options.network_gb_per_s, intra_node=options.intra_node_gb_per_s)
    rates = Rates(**{name: rate for name, rate in given.items() if rate is not None})
    ranks = range(train.num_ranks) if options.all_ranks else None
    result = forecast(train, serve, rates, staging_mib=options.staging_mib, ranks=ranks)
    _warn_of_memory(result["bytes_serve_max"] / 2**30, options.memory_gib)
    return result


def _warn_of_memory(needed_gib: float, memory_gib: float) -> None:
    """Say so where the weights alone do not fit an engine rank's device."""
    if needed_gib > memory_gib:
        print(
            f"gyre plan: an engine rank holds {needed_gib:.0f} GiB of weights, its device "
            f"{memory_gib:g} GiB (--memory-gib): serve with more tp or ep",
            file=sys.stderr,
        )


def _print(result: dict[str, Any]) -> None:
    shown = {name: value for name, value in result.items() if name not in _UNPRINTED}
    print(json.dumps(shown, indent=1))
    for tensor in result["largest_tensors"]:
        print(f"{tensor['bytes'] / 2**20:10.1f} MiB  {tensor['name']}  {tuple(tensor['shape'])}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre plan", description="Forecast a reshard of weights, without the weights."
    )
    parser.add_argument(
        "--config", required=True, help="a file with model.architecture, or a shipped one's name"
    )
    parser.add_argument(
        "--train",
        default="tp1",
        help="Megatron's layout, e.g. tp4,pp4,ep64,etp1 (also vpp, cp, dp); default tp1",
    )
    parser.add_argument(
        "--serve",
        default="tp1",
        help="SGLang's layout, e.g. tp16,ep16 (dp: attention data parallelism); default tp1",
    )
    parser.add_argument(
        "--network-gb-per-s", type=float, help="of a rank; a 400 Gb/s port if not given"
    )
    parser.add_argument(
        "--intra-node-gb-per-s", type=float, help="of a rank; an H200's NVLink if not given"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=141.0, help="of an engine rank's device (141, an H200)"
    )
    parser.add_argument("--staging-mib", type=int, default=128, help="buffers of a transport (128)")
    parser.add_argument(
        "--all-ranks", action="store_true", help="time the planning of every rank, not of a few"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the forecast here too")
    return parser
