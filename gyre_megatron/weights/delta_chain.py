"""What the core sends down the chain of cells where the cells hold an earlier version: the
difference alone, if it is small enough to be worth it.

The core keeps a copy of the weights it sent last to a chain. All cells say which version they hold;
if that is the version of the copy, the core encodes the difference (`delta`), announces its chunks
and sends their payload down the chain as it would send weights. Cells pass it on as it is and apply
it to what they hold. Where the cells hold different versions, or too much has changed, the weights
go whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from gyre_megatron.weights import delta
from gyre_megatron.weights.rendezvous import Rendezvous

CHUNK_BYTES = 32 << 20
WORTH_IT = 0.5
"""A delta above this share of the weights is sent whole: encoding and applying take time, too."""


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of the announced payload."""

    form: int
    num_bytes: int
    checksum: int


_encode = msgspec.msgpack.Encoder().encode
_decode_chunks = msgspec.msgpack.Decoder(list[_Chunk]).decode
_decode_held = msgspec.msgpack.Decoder(int | None).decode


@dataclass(frozen=True)
class Versions:
    """Of one process's weights: what it holds, and what all are to hold afterwards. `held` is None
    where it is unknown."""

    held: int | None
    wanted: int


@dataclass
class _Copy:
    version: int
    buffers: list[torch.Tensor]


class DeltaChain:
    """One process's part in deltas down one chain of cells.

    Args:
        rendezvous: of the chain's processes, the core first; used for nothing else.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._meet = rendezvous
        self._copy: _Copy | None = None

    def encode(
        self, buffers: Sequence[torch.Tensor], versions: Versions
    ) -> tuple[bytes, torch.Tensor] | None:
        """Agree on what is sent; collective over the chain.

        Returns:
            Announcement and payload (uint8 [bytes], filled in the core only); None if the weights
            are sent whole.

        Raises:
            TransferError: a process failed or did not answer.
        """
        self._meet.start()
        held = _encode(versions.held)
        said = self._meet.exchange("asking which weights the cells hold", payload=held)
        announced, payload = b"", torch.empty(0, dtype=torch.uint8)
        if self._meet.process == 0:
            others = {_decode_held(one) for one in said[1:]}
            if self._copy is not None and others == {self._copy.version}:
                announced, payload = self._difference(buffers, self._copy)
        # The others wait while the core encodes: one pass over its shard.
        announced = self._meet.exchange("announcing a delta", payload=announced)[0]
        if not announced:
            return None
        if self._meet.process != 0:
            total = sum(chunk.num_bytes for chunk in _decode_chunks(announced))
            payload = torch.empty(total, dtype=torch.uint8)
        return announced, payload

    def apply(
        self, announced: bytes, payload: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> None:
        """Bring `buffers` to what was sent; in every cell but the core.

        Raises:
            TransferError: the buffers did not hold the version that they were said to hold; they
                must not be used.
        """
        start = 0
        chunks = _decode_chunks(announced)
        for chunk, (target, size) in zip(chunks, _chunks(buffers), strict=True):
            data = payload[start : start + chunk.num_bytes].numpy()
            start += chunk.num_bytes
            encoded = delta.EncodedChunk(delta.Form(chunk.form), data, chunk.checksum)
            held = target.cpu()  # itself, on a CPU
            delta.apply(encoded, held, size)
            if target.is_cuda:
                target.copy_(held)

    def sent(self, buffers: Sequence[torch.Tensor], version: int) -> None:
        """All cells of the chain hold the core's `buffers` now; in the core."""
        if self._copy is None:
            self._copy = _Copy(version, [_bytes(buffer).cpu().clone() for buffer in buffers])
            return
        self._copy.version = version
        for kept, buffer in zip(self._copy.buffers, buffers, strict=True):
            kept.copy_(_bytes(buffer))

    def _difference(
        self, buffers: Sequence[torch.Tensor], base: _Copy
    ) -> tuple[bytes, torch.Tensor]:
        chunks: list[_Chunk] = []
        parts: list[np.ndarray] = []
        total = 0
        limit = WORTH_IT * sum(kept.numel() for kept in base.buffers)
        before = (kept for whole in base.buffers for kept in whole.split(CHUNK_BYTES))
        for (current, size), kept in zip(_chunks(buffers), before, strict=True):
            encoded = delta.encode(current.cpu(), kept, size)
            # Whole chunks are views of the live weights and stay so: they are only read.
            parts.append(encoded.payload)
            chunks.append(_Chunk(encoded.form, len(encoded.payload), encoded.checksum))
            total += len(encoded.payload)
            if total > limit:
                return b"", torch.empty(0, dtype=torch.uint8)
        payload = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        return _encode(chunks), torch.from_numpy(payload)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().view(-1).view(torch.uint8)


def _chunks(buffers: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Bytes and element size of every chunk."""
    for buffer in buffers:
        for chunk in _bytes(buffer).split(CHUNK_BYTES):
            yield chunk, buffer.element_size()
