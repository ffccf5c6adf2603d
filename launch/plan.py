"""Forecast a reshard without weights: bytes per rank, the bound, staging memory and the largest
tensors.

python launch/plan.py --config configs/models/qwen3_8_2_4t_a95b.yaml --train tp4,pp4,ep64,etp1
--serve tp16,ep16
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gyre_megatron.config.loader import load_config
from gyre_megatron.errors import GyreError
from gyre_megatron.weights.forecast import Rates, forecast, serving_layout, training_layout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a file with model.architecture")
    parser.add_argument(
        "--train", required=True, help="Megatron layout, e.g. tp4,pp4,ep64,etp1 (also vpp, cp, dp)"
    )
    parser.add_argument(
        "--serve",
        required=True,
        help="SGLang layout, e.g. tp16,ep16 (dp: attention data parallelism)",
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
        architecture = load_config(options.config, partial=True).config.model.shape()
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
