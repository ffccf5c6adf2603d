"""Hugging Face checkpoints in and out of Megatron modules, shard by shard.

A checkpoint is one more layout: every canonical tensor whole. Loading reads only the slices that a
rank holds; saving gathers bounded groups of tensors to one rank, which writes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import CheckpointError
from gyre_megatron.weights.boxes import Index, LocalBox
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.fp8_checkpoint import FP8_DTYPES, dequantize_box, scale_name
from gyre_megatron.weights.layout import WholeLayout
from gyre_megatron.weights.megatron import bind, layout_of
from gyre_megatron.weights.parallel import ParallelRank
from gyre_megatron.weights.planner import plan_rank
from gyre_megatron.weights.streams import WireDtype
from gyre_megatron.weights.transports.base import Transport

_INDEX = "model.safetensors.index.json"


class CheckpointReader:
    """Reads boxes of named tensors from the safetensors files of a checkpoint directory; FP8 ones
    as the numbers that they stand for.

    Raises:
        CheckpointError: the directory holds no safetensors, or a name is in none of its files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] = {}
        index = self.path / _INDEX
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._files = {name: self.path / file for name, file in weight_map.items()}
        else:
            for file in sorted(self.path.glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
        if not self._files:
            raise CheckpointError(
                f"{self.path} holds no *.safetensors; give a Hugging Face checkpoint directory"
            )

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, local_boxes: Sequence[LocalBox]) -> Iterator[tuple[LocalBox, torch.Tensor]]:
        """Yield every local box with its box's values, each file opened once."""
        by_file: dict[Path, list[LocalBox]] = {}
        for local_box in local_boxes:
            if local_box.name not in self._files:
                raise CheckpointError(
                    f"{self.path} has no tensor {local_box.name}, which {local_box.tensor} needs; the "
                    "checkpoint belongs to "
                    "another architecture"
                )
            by_file.setdefault(self._files[local_box.name], []).append(local_box)
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as opened:
                for local_box in wanted:
                    yield local_box, self._slice(opened, local_box)

    def _slice(self, opened, local_box: LocalBox) -> torch.Tensor:
        lazy = opened.get_slice(local_box.name)
        shape = tuple(lazy.get_shape())
        if len(shape) != len(local_box.shape) or any(
            s + n > have for s, n, have in zip(local_box.start, local_box.shape, shape, strict=True)
        ):
            raise CheckpointError(
                f"{local_box.name} has shape {tuple(shape)} in {self.path}, but the architecture needs "
                f"{local_box.box}"
            )
        values = lazy[
            tuple(slice(s, s + n) for s, n in zip(local_box.start, local_box.shape, strict=True))
        ]
        if values.dtype not in FP8_DTYPES:
            return values
        scales = self._scales(local_box.name)
        return dequantize_box(values, scales, local_box.box, shape, local_box.name)

    def _scales(self, name: str) -> torch.Tensor:
        """The scales of an FP8 tensor, which may lie in another file."""
        scale = scale_name(name, self._files)
        with safe_open(self._files[scale], "pt") as opened:
            return opened.get_tensor(scale)


def box_view(tensor: torch.Tensor, local_box: LocalBox) -> torch.Tensor:
    """A local box as a strided view of its local tensor."""
    return tensor.as_strided(
        local_box.shape, local_box.strides, tensor.storage_offset() + local_box.offset
    )


@torch.no_grad()
def load_hf_checkpoint(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    place: ParallelRank,
    path: str | Path,
) -> int:
    """Fill this rank's Megatron parameters and persistent buffers from a checkpoint; padding rows
    become zero.

    Returns:
        Bytes read.

    Raises:
        LayoutError: the modules do not match `architecture` and `place`.
        CheckpointError: a tensor is missing or has another shape.
    """
    layout = layout_of(architecture, place, model_chunks)
    tensors = bind(layout, place.index, model_chunks)
    for local in layout.tensors(place.index):
        if sum(local_box.numel for local_box in local.local_boxes) < tensors[local.key].numel():
            tensors[local.key].zero_()
    nbytes = 0
    for local_box, values in CheckpointReader(path).read(list(layout.local_boxes(place.index))):
        box_view(tensors[local_box.tensor], local_box).copy_(values)
        nbytes += values.numel() * values.element_size()
    return nbytes


def hf_named_tensors(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    place: ParallelRank,
    transport: Transport,
    dtype: torch.dtype,
    leader: int = 0,
    group_bytes: int = 256 << 20,
) -> Iterator[dict[str, torch.Tensor]]:
    """Gather the model to process `leader` in groups of whole canonical tensors of about
    `group_bytes`.

    Collective over the cell: every rank must exhaust the iterator. Other ranks receive empty
    dictionaries. The tensors of a group are reused by nobody and may be kept.
    """
    layout = layout_of(architecture, place, model_chunks)
    sources = bind(layout, place.index, model_chunks)
    wire = wire_dtypes(dtype)
    for group in name_groups(canonical_tensors(architecture), wire, group_bytes):
        whole = WholeLayout(group, layout.num_ranks, leader)
        plan = plan_rank(layout, whole, place.index, names=group)
        mine = place.index == leader
        targets = (
            {n: torch.empty(shape, dtype=wire(n)) for n, shape in group.items()} if mine else {}
        )
        Resharder(plan, sources, targets, transport, wire).run()
        yield targets


FLOAT32_SUFFIXES = ("gate.e_score_correction_bias", "linear_attn.A_log")


def wire_dtypes(dtype: torch.dtype) -> WireDtype:
    """`dtype` for all tensors but those that every framework keeps in float32."""
    return lambda name: torch.float32 if name.endswith(FLOAT32_SUFFIXES) else dtype


def name_groups(
    tensors: Mapping[str, Index], wire: WireDtype, group_bytes: int
) -> Iterator[dict[str, Index]]:
    """Cut a list of tensors into consecutive groups of at most `group_bytes` (or one larger
    tensor)."""
    group: dict[str, Index] = {}
    used = 0
    for name, shape in tensors.items():
        size = torch.Size(shape).numel() * wire(name).itemsize
        if group and used + size > group_bytes:
            yield group
            group, used = {}, 0
        group[name] = shape
        used += size
    if group:
        yield group


def save_hf_checkpoint(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    place: ParallelRank,
    transport: Transport,
    path: str | Path,
    template: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write a Hugging Face checkpoint of the model; collective over the cell, written by its rank
    0.

    The directory appears whole, by a rename.

    Args:
        template: a checkpoint directory whose config and tokenizer files are copied.

    Raises:
        CheckpointError: `path` exists already.
    """
    final = Path(path)
    partial = final.with_name(final.name + ".partial")
    if place.index == 0:
        if final.exists():
            raise CheckpointError(f"{final} exists; remove it or choose another directory")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    groups = hf_named_tensors(model_chunks, architecture, place, transport, dtype, 0, shard_bytes)
    for number, group in enumerate(groups):
        if place.index == 0:
            file = f"model-{number:05d}.safetensors"
            save_file(group, partial / file, {"format": "pt"})
            weight_map |= dict.fromkeys(group, file)
    if place.index == 0:
        (partial / _INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
        )
        for extra in Path(template).iterdir():
            if extra.is_file() and ".safetensors" not in extra.name:
                shutil.copy2(extra, partial / extra.name)
        os.rename(partial, final)
