"""Train with Gyre: torchrun --nproc-per-node N launch/train_gyre.py --config FILE [--set a.b=c]
[--resume]

One process per device. Ranks are grouped into cluster.num_cells equal cells; see ARCHITECTURE.md.
"""

import argparse
import os
import sys
import warnings


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="torchrun --nproc-per-node N launch/train_gyre.py --config FILE [--set a.b=c ...] [--resume]",
        description="Train a coding agent: cells of ranks serve rollouts (SGLang) or train (Megatron).",
    )
    parser.add_argument(
        "--config", required=True, help="YAML file, for example configs/demo_cpu.yaml"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="a.b=c",
        help="override a value",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint in the run's directory",
    )
    if os.environ.get("RANK", "0") != "0":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  rank 0 says it once
    try:
        return parser.parse_args(argv)
    finally:
        sys.stderr = sys.__stderr__


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    first = os.environ.get("RANK", "0") == "0"
    from gyre_megatron.config.loader import load_config
    from gyre_megatron.errors import ConfigError, GyreError

    try:
        if "RANK" not in os.environ:
            raise ConfigError(
                "start this script with torchrun: torchrun --nproc-per-node N launch/train_gyre.py "
                "..."
            )
        config = load_config(arguments.config, arguments.overrides).config
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr) if first else None
        return 2
    words = [
        "--config",
        arguments.config,
        *(w for override in arguments.overrides for w in ("--set", override)),
    ]
    warnings.filterwarnings(
        "ignore", module=r"megatron\.|torch\."
    )  # what they miss on this machine is known
    from gyre_megatron.runtime.rank import run_rank

    try:
        run_rank(config, words, arguments.resume)
    except GyreError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
