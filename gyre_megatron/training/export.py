"""A checkpoint of Megatron's as one in Hugging Face format, without a trainer or an optimizer.

Called by `gyre export` on every rank of one cell's world. The layout need not be the one that wrote
the checkpoint: Megatron reads its own format in any.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.cpu import local_device
from gyre_megatron.training import checkpoint, parallel
from gyre_megatron.training.model import build_model_chunks
from gyre_megatron.training.model_config import DTYPES
from gyre_megatron.weights.checkpoint import save_hf_checkpoint
from gyre_megatron.weights.transports.choose import open_transport

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Endings of files that hold somebody's weights: those of the base model are not the run's."""


def export_checkpoint(
    source: Path,
    base: Path,
    output: Path,
    training: TrainingConfig,
    architecture: Architecture,
    weights: WeightsConfig,
    dtype: str,
) -> None:
    """Write the weights in `source` as a Hugging Face checkpoint; collective over the default
    process group, written by its rank 0.

    `output` appears whole, by a rename, or not at all.

    Args:
        source: what `Trainer.save_checkpoint` wrote.
        base: the checkpoint that training began from: its config.json (with the new type of
            values) and its tokenizer's files are copied.
        output: a directory that does not exist.
        training: layout of these ranks, and the type that the weights have in memory.
        weights: what carries them to rank 0.
        dtype: type of the values written, "fp32" or "bf16".

    Raises:
        ConfigError: the layout does not fit the ranks or the model.
        CheckpointError: `source` is incomplete or belongs to another model, or `output` exists.
    """
    parallel.initialize(training, architecture)
    chunks = build_model_chunks(architecture, training)
    checkpoint.load(source, chunks, None, None)
    rank = dist.get_rank()
    transport = open_transport(
        weights.model_copy(update={"file_dir": weights.file_dir or output.parent}),
        dist.distributed_c10d._get_default_store(),
        rank,
        dist.get_world_size(),
        name=f"gyre/export/{output}",
        device=local_device(),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="gyre-export-") as folder:
            if rank == 0:
                copy_description(base, Path(folder), dtype)
            place = parallel.parallel_rank(training, architecture)
            save_hf_checkpoint(
                chunks, architecture, place, transport, output, folder, DTYPES[dtype]
            )
    except BaseException:
        if rank == 0:
            shutil.rmtree(output.with_name(f"{output.name}.partial"), ignore_errors=True)
        raise
    finally:
        transport.close()


def copy_description(base: Path, folder: Path, dtype: str) -> None:
    """Copy everything of a checkpoint but its weights; config.json says that they are `dtype`."""
    for file in base.iterdir():
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights:
            shutil.copy2(file, folder / file.name)
    config = json.loads((base / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5
    config[key] = str(DTYPES[dtype]).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
