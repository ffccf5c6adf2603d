"""The next version of an engine's weights, assembled in shared memory beside the version that
serves.

Made by the loader in the engine's process, filled by the trainers of the same host, verified and
committed by the loader. The file is unlinked as soon as everyone has mapped it, so nothing outlives
the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gyre_megatron.errors import TransferError
from gyre_megatron.ops.boxes import box_checksum
from gyre_megatron.weights.boxes import Index
from gyre_megatron.weights.transports.base import map_file, reserve_file

SHADOW_FILE, STATUS_FILE = "shadow.{rank}", "status.{rank}.json"
_ALIGN = 64


class TensorSpec(NamedTuple):
    """One tensor of a shadow."""

    key: str
    shape: Index
    dtype: str
    """Name of a torch dtype, e.g. "bfloat16"."""
    offset: int
    """Byte at which it begins."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Lay tensors one after the other, each at a multiple of 64 bytes."""
    specs, offset = [], 0
    for key, tensor in tensors.items():
        spec = TensorSpec(
            key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset
        )
        specs.append(spec)
        offset += -(-spec.nbytes // _ALIGN) * _ALIGN
    return specs


class Shadow:
    """Tensors in a memory-mapped file."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.nbytes = max((spec.offset + spec.nbytes for spec in specs), default=0)
        if path.stat().st_size < self.nbytes:
            raise TransferError(
                f"{path} holds {path.stat().st_size} bytes, but its tensors need {self.nbytes}"
            )
        self._memory = whole = map_file(path, max(1, self.nbytes))
        self.tensors = {
            spec.key: whole[spec.offset : spec.offset + spec.nbytes]
            .view(spec.torch_dtype)
            .reshape(spec.shape)
            for spec in specs
        }

    @classmethod
    def create(cls, path: Path, specs: Sequence[TensorSpec]) -> Shadow:
        """Make the file at its full size and map it.

        Raises:
            OSError: the memory-backed file system is full.
        """
        size = max((spec.offset + spec.nbytes for spec in specs), default=1)
        with path.open("wb") as file:
            reserve_file(file.fileno(), size)
        return cls(path, specs)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A position-dependent checksum of each tensor's bits."""
    return {key: box_checksum(tensor) for key, tensor in tensors.items()}
