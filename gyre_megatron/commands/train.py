"""`gyre train`: take part in a run as one rank of torchrun, or start torchrun.

Called by `gyre`, launch/train_gyre.py and, as `run`, by users' own programs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import yaml

from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.errors import ConfigError, GyreError
from gyre_megatron.versions import MEGATRON, SGLANG, require

USAGE = """gyre train --nproc-per-node N --config FILE [--set a.b=c ...] [--resume]
       torchrun --nproc-per-node N launch/train_gyre.py --config FILE [...]
       torchrun --nnodes M ... -m gyre_megatron train --config FILE [...]"""


def run(config: GyreConfig, *, resume: bool = False) -> None:
    """Take part in a run as this torchrun rank, until the run ends; call it on every rank.

    Args:
        config: what `load_config(...).config` gives, or one built in Python.
        resume: go on from the latest checkpoint in the run's directory.

    Raises:
        GyreError: the configuration cannot work, or the run failed; the message says how to mend
            it.
    """
    if "RANK" not in os.environ:
        raise ConfigError(
            "this process is no torchrun rank (RANK is not set); start the program with "
            "torchrun --nproc-per-node N PROGRAM"
        )
    require(MEGATRON)  # here, and not in each process that imports them, where nobody would see it
    require(SGLANG)
    from gyre_megatron.runtime.rank import run_rank

    # What Megatron and torch miss on this machine is known; `gyre doctor` says it once.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    with tempfile.TemporaryDirectory(prefix="gyre-config-") as folder:
        # The control plane is a process of its own: it loads the same values from this file.
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        run_rank(config, ["--config", str(file)], resume)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    under_torchrun = "RANK" in os.environ
    speaks = os.environ.get("RANK", "0") == "0"  # what all ranks would say, one says
    with contextlib.ExitStack() as stack:
        if not speaks:
            stack.enter_context(
                contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w")))
            )
        options = _parser().parse_args(arguments)
        try:
            config = load_config(options.config, options.overrides).config
            if not under_torchrun:
                _become_torchrun(options)
            if options.nproc_per_node is not None:
                raise ConfigError("--nproc-per-node is torchrun's here: leave it out of gyre train")
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
    try:
        run(config, resume=options.resume)
    except GyreError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre train",
        usage=USAGE,
        allow_abbrev=False,
        description="Train a coding agent: cells of ranks serve rollouts (SGLang) or train "
        "(Megatron). One process a device; ranks form cluster.num_cells equal cells.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="a.b=c", help="one value"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run's latest checkpoint"
    )
    parser.add_argument(
        "--nproc-per-node", metavar="N", help="start torchrun on this machine with N ranks"
    )
    return parser


def _become_torchrun(options: argparse.Namespace) -> None:
    """Replace this process by a torchrun of one machine, so that signals reach it directly."""
    words = ["-m", "gyre_megatron", "train", "--config", options.config]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--resume"] if options.resume else []
    ranks = options.nproc_per_node
    if ranks is None:
        raise ConfigError(
            "how many ranks? Add --nproc-per-node N (one a device), or start it yourself: "
            f"torchrun --nproc-per-node N {shlex.join(words)}"
        )
    if not (ranks.isdigit() and int(ranks) > 0) and ranks not in ("gpu", "cpu", "auto"):
        raise ConfigError(f"--nproc-per-node {ranks}: a number of ranks was expected")
    # One thread a rank is torchrun's own default, which it would announce in four lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *torchrun, *words])
