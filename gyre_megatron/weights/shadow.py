"""The next version of an engine's weights, assembled in shared memory beside the version that
serves.

Made by the loader in the engine's process, filled by the trainers, verified and committed by the
loader. The file is unlinked as soon as everyone has mapped it, so nothing outlives the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from gyre_megatron.errors import TransferError
from gyre_megatron.ops.boxes import box_checksum
from gyre_megatron.weights.boxes import Index
from gyre_megatron.weights.shared_memory import map_file, reserve_file

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


class Window(msgspec.Struct, frozen=True):
    """A file with tensors that other processes of its host may map and write into."""

    path: str
    specs: list[TensorSpec]


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Lay tensors one after the other, each at a multiple of 64 bytes."""
    specs: list[TensorSpec] = []
    offset = 0
    for key, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(key, tuple(tensor.shape), dtype, offset)
        specs.append(spec)
        offset += -(-spec.nbytes // _ALIGN) * _ALIGN
    return specs


class Shadow:
    """Tensors in a memory-mapped file."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.window = Window(str(path), list(specs))
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
        """Make the file at its full size, all zeros, and map it.

        Raises:
            OSError: the memory-backed file system is full.
        """
        size = max((spec.offset + spec.nbytes for spec in specs), default=1)
        with path.open("wb") as file:
            reserve_file(file.fileno(), size)
        return cls(path, specs)

    @classmethod
    def of(cls, window: Window) -> Shadow:
        """Map a file that another process made.

        Raises:
            OSError: there is no such file.
            TransferError: it is too short.
        """
        return cls(Path(window.path), window.specs)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A position-dependent checksum of each tensor's bits."""
    return {key: box_checksum(tensor) for key, tensor in tensors.items()}
