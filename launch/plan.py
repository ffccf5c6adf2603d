"""Forecast a reshard without weights: bytes per rank, the bound, staging memory and the largest
tensors.

python launch/plan.py --config configs/models/qwen3_8_2_4t_a95b.yaml --train tp8,pp8,ep64 --serve
tp32,ep32
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError, GyreError
from gyre_megatron.weights.forecast import Rates, forecast, serving_layout, training_layout


def read_architecture(path: Path) -> Architecture:
    """`model.architecture` of a configuration file."""
    section = (yaml.safe_load(path.read_text()) or {}).get("model", {}).get("architecture")
    if section is None:
        raise ConfigError(f"{path} has no model.architecture; take a file of configs/models/")
    return Architecture.model_validate(section)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a file with model.architecture")
    parser.add_argument(
        "--train", required=True, help="Megatron layout, e.g. tp8,pp8,ep64 (also vpp, etp, cp, dp)"
    )
    parser.add_argument(
        "--serve",
        required=True,
        help="SGLang layout, e.g. tp32,ep32 (dp: attention data parallelism)",
    )
    parser.add_argument("--network-gb-per-s", type=float, default=Rates.network, help="per rank")
    parser.add_argument(
        "--intra-node-gb-per-s", type=float, default=Rates.intra_node, help="per rank"
    )
    parser.add_argument("--staging-mib", type=int, default=128)
    parser.add_argument(
        "--all-ranks", action="store_true", help="plan every rank instead of the extremes"
    )
    parser.add_argument("--json", type=Path, help="write the forecast here")
    options = parser.parse_args()
    try:
        architecture = read_architecture(options.config)
        train = training_layout(architecture, options.train)
        serve = serving_layout(architecture, options.serve)
        rates = Rates(options.network_gb_per_s, options.intra_node_gb_per_s)
        ranks = range(train.num_ranks) if options.all_ranks else None
        result = forecast(train, serve, rates, staging_mib=options.staging_mib, ranks=ranks)
    except GyreError as error:
        sys.exit(f"plan: {error}")
    print(
        json.dumps(
            {k: v for k, v in result.items() if k not in ("largest_tensors", "ranks_planned")},
            indent=1,
        )
    )
    for tensor in result["largest_tensors"]:
        print(f"{tensor['bytes'] / 2**20:10.1f} MiB  {tensor['name']}  {tuple(tensor['shape'])}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
