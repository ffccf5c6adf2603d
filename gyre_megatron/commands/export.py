"""`gyre export`: the weights of a run as a checkpoint in Hugging Face format.

    gyre export runs/NAME DIRECTORY [--step N]
    torchrun --nproc-per-node N -m gyre_megatron export runs/NAME DIRECTORY

In one process the whole model is in that process's memory, whatever layout the run trained in;
under torchrun it is divided as the run divided it. Everything that can be refused is refused before
Megatron is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gyre_megatron.config.base import one_line
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import CheckpointError, RunDirectoryError
from gyre_megatron.runtime.run_directory import CheckpointInfo, RunDirectory
from gyre_megatron.versions import MEGATRON, require

DTYPES = ("fp32", "bf16")
_ONE_RANK = dict(tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, sequence_parallel=None)


@dataclass(frozen=True)
class ExportPlan:
    """What is written from what; made without torch.

    Attributes:
        config: of the run.
        source: the checkpoint that is exported.
        base: the Hugging Face checkpoint that the run began from.
        output: the directory to make.
        dtype: type of the values written.
    """

    config: GyreConfig
    source: CheckpointInfo
    base: Path
    output: Path
    dtype: str

    def training(self, num_ranks: int) -> TrainingConfig:
        """The layout of `num_ranks` ranks."""
        training = self.config.training
        return training.model_copy(update=_ONE_RANK) if num_ranks == 1 else training


def plan_export(
    run: Path,
    output: Path,
    step: int | None = None,
    base: Path | None = None,
    dtype: str | None = None,
) -> ExportPlan:
    """Check that a run can be exported; writes nothing.

    Args:
        run: the run's directory.
        step: optimizer steps in the checkpoint; None takes the latest.
        base: the checkpoint that the run began from, where it no longer lies where it did.
        dtype: None takes that of training.

    Raises:
        RunDirectoryError: `run` holds no run, or one of another version.
        CheckpointError: it has no such checkpoint, its base is gone, or `output` exists.
    """
    config = _config_of(run)
    source = RunDirectory(run).checkpoint_at(step)
    if os.path.lexists(output):
        raise CheckpointError(f"{output} exists; remove it, or name another directory")
    base = base or _base_of(config, run)
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"{base}, which this run began from, is no Hugging Face checkpoint any more (it has no "
            "config.json); say with --base where it is"
        )
    return ExportPlan(config, source, base, output.absolute(), dtype or config.training.dtype)


def write(plan: ExportPlan) -> None:
    """Do what was planned; collective over the default process group, one call a process.

    Raises:
        ConfigError: the ranks do not fit the run's layout.
        CheckpointError: the checkpoint is incomplete or belongs to another model.
    """
    import torch.distributed as dist

    from gyre_megatron.training.export import export_checkpoint

    export_checkpoint(
        plan.source.directory,
        plan.base,
        plan.output,
        plan.training(dist.get_world_size()),
        Architecture.from_checkpoint(plan.base, plan.config.model.family),
        plan.config.weights,
        plan.dtype,
    )


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    plan = plan_export(options.run, options.output, options.step, options.base, options.dtype)
    require(MEGATRON)
    # What Megatron and torch miss on this machine is known; `gyre doctor` says it once.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    with tempfile.TemporaryDirectory(prefix="gyre-export-") as folder:
        rank = _start_process_group(Path(folder))
        write(plan)
    if rank == 0:
        print(f"{plan.output}: step {plan.source.step} of {options.run}, {plan.dtype}")
        _say_what_is_left_out(plan)
    return 0


def _config_of(run: Path) -> GyreConfig:
    file = RunDirectory(run).config_file
    if not file.is_file():
        raise RunDirectoryError(
            f"{run} is no run directory: it has no config.json; name one such as runs/NAME"
        )
    try:
        return GyreConfig.model_validate(json.loads(file.read_text()))
    except ValidationError as error:
        raise RunDirectoryError(
            f"{file} was not written by this version of Gyre: {one_line(error)}"
        ) from None
    except ValueError as error:
        raise RunDirectoryError(f"{file} is damaged: {error}") from None


def _base_of(config: GyreConfig, run: Path) -> Path:
    """Where the run's base checkpoint is: a tiny one was made beside the run."""
    if config.model.tiny is not None:
        return config.model.tiny.directory(run.absolute().parent)
    if config.model.checkpoint is None:
        raise RunDirectoryError(f"{run}/config.json names no model; say with --base which it was")
    return config.model.checkpoint


def _start_process_group(folder: Path) -> int:
    """Join torchrun's ranks, or be the only one; returns this process's rank."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        from gyre_megatron.cpu import enable_cpu

        enable_cpu()  # before the modules that import Megatron
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, init_method="env://")
    else:
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return dist.get_rank()


def _say_what_is_left_out(plan: ExportPlan) -> None:
    from gyre_megatron.weights.checkpoint import CheckpointReader

    left_out = sorted(CheckpointReader(plan.base).names - CheckpointReader(plan.output).names)
    if left_out:
        print(
            f"left out, because training does not hold them: {len(left_out)} tensors of "
            f"{plan.base}, such as {left_out[0]}"
        )


def _step(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: a number of optimizer steps was expected")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre export",
        description="Write a run's weights as a checkpoint in Hugging Face format.",
        epilog="A model that one process cannot hold is exported under torchrun, in the run's own "
        "layout: torchrun --nproc-per-node N -m gyre_megatron export RUN DIRECTORY. Without GPUs, "
        "or with CUDA_VISIBLE_DEVICES empty, it is done on the CPU.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, runs/NAME")
    parser.add_argument("output", type=Path, metavar="DIRECTORY", help="made; must not exist")
    parser.add_argument("--step", type=_step, metavar="N", help="its checkpoint of that step")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the values written; that of training if not given"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="the checkpoint the run began from, where it has been moved",
    )
    return parser
