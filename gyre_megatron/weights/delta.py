"""What changed between two versions of a buffer, without loss: after one step in bf16 few elements
differ, so a slow link carries those alone.

Pure: bytes in, bytes out; who holds which version is the caller's business. An encoded chunk is the
smallest of four forms, chosen by how many of its elements changed:

| form | bytes, for n elements of size s of which c changed |
| --- | --- |
| same | 0 |
| places | 2 c + 4 ceil(n / 65536) + c s: the low 16 bits of each place, the number of places in each block of 65,536 |
| mask | ceil(n / 8) + c s: one bit an element |
| whole | n s |

Elements are compared as bits, so NaN, infinities and signed zeros arrive as they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from gyre_megatron.errors import TransferError

BLOCK = 1 << 16
"""Elements whose place in their block fits in 16 bits."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Form(IntEnum):
    """How a chunk is written."""

    SAME = 0
    PLACES = 1
    MASK = 2
    WHOLE = 3


@dataclass(frozen=True)
class EncodedChunk:
    """One chunk on its way.

    Attributes:
        form: how `payload` is to be read.
        payload: uint8 [bytes].
        checksum: of the chunk as it is after decoding (`checksum`).
    """

    form: Form
    payload: np.ndarray
    checksum: int


def checksum(chunk: torch.Tensor) -> int:
    """Sum of the chunk's 64-bit words, modulo 2**64; words of a shorter end are filled with zeros.

    Args:
        chunk: uint8 [bytes], on the CPU.
    """
    data = chunk.numpy()
    whole = len(data) // 8 * 8
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    return (total + rest) % 2**64


def encode(current: torch.Tensor, base: torch.Tensor | None, element_size: int) -> EncodedChunk:
    """Write `current` as its difference from `base`, or whole where that is smaller.

    Args:
        current: uint8 [bytes], contiguous, on the CPU; a whole number of elements.
        base: what the receiver holds, of the same size; None writes the chunk whole.
        element_size: bytes of an element: 1, 2, 4 or 8.

    Raises:
        TransferError: the sizes do not agree.
    """
    new = _elements(current, element_size)
    total = checksum(current)
    if base is None:
        return EncodedChunk(Form.WHOLE, current.numpy(), total)
    old = _elements(base, element_size)
    if len(old) != len(new):
        raise TransferError(
            f"a delta of {len(new)} elements against a base of {len(old)}; both ends must hold the "
            "same shard"
        )
    changed = new != old
    num_changed = int(np.count_nonzero(changed))
    sizes = {
        Form.SAME: 0 if num_changed == 0 else current.numel() + 1,
        Form.PLACES: num_changed * (2 + element_size) + 4 * _num_blocks(len(new)),
        Form.MASK: -(-len(new) // 8) + num_changed * element_size,
        Form.WHOLE: current.numel(),
    }
    form = min(sizes, key=lambda kind: (sizes[kind], kind))
    if form is Form.WHOLE:
        return EncodedChunk(form, current.numpy(), total)
    if form is Form.SAME:
        return EncodedChunk(form, np.empty(0, np.uint8), total)
    if form is Form.MASK:
        parts = [np.packbits(changed, bitorder="little"), new[changed].view(np.uint8)]
    else:
        places = np.flatnonzero(changed)
        counts = np.bincount(places // BLOCK, minlength=_num_blocks(len(new))).astype(np.uint32)
        low = (places % BLOCK).astype(np.uint16)
        parts = [counts.view(np.uint8), low.view(np.uint8), new[places].view(np.uint8)]
    return EncodedChunk(form, np.concatenate(parts), total)


def apply(chunk: EncodedChunk, target: torch.Tensor, element_size: int) -> None:
    """Bring `target` from the base to what was encoded, in place.

    Args:
        target: uint8 [bytes], contiguous, on the CPU; holds the base that the sender encoded
            against, unless the chunk is whole.

    Raises:
        TransferError: the payload does not fit the target, or the result is not what was sent: the
            target did not hold that base. It must not be used.
    """
    elements = _elements(target, element_size)
    payload = chunk.payload
    if chunk.form is Form.WHOLE:
        _expect(len(payload) == target.numel(), "a whole chunk", payload, target)
        target.numpy()[:] = payload
    elif chunk.form is Form.MASK:
        num_mask = -(-len(elements) // 8)
        _expect(len(payload) >= num_mask, "a mask", payload, target)
        mask = np.unpackbits(payload[:num_mask], count=len(elements), bitorder="little")
        values = payload[num_mask:].view(elements.dtype)
        _expect(len(values) == int(mask.sum()), "a mask's values", payload, target)
        elements[mask.astype(bool)] = values
    elif chunk.form is Form.PLACES:
        num_blocks = _num_blocks(len(elements))
        counts = payload[: 4 * num_blocks].view(np.uint32).astype(np.int64)
        num_changed = int(counts.sum())
        expected = 4 * num_blocks + num_changed * (2 + element_size)
        _expect(len(payload) == expected, "places", payload, target)
        middle = 4 * num_blocks + 2 * num_changed
        low = payload[4 * num_blocks : middle].view(np.uint16)
        places = np.repeat(np.arange(num_blocks) * BLOCK, counts) + low
        elements[places] = payload[middle:].view(elements.dtype)
    if checksum(target) != chunk.checksum:
        raise TransferError(
            "a delta did not give what was sent: the receiver did not hold the version that the "
            "sender encoded against, or the bytes changed on the way; send the weights whole "
            "(weights.delta: false)"
        )


def _elements(data: torch.Tensor, element_size: int) -> np.ndarray:
    if element_size not in _UNSIGNED or data.numel() % element_size:
        raise TransferError(
            f"{data.numel()} bytes are no whole number of elements of {element_size} bytes; "
            "elements of 1, 2, 4 or 8 bytes are sent"
        )
    return data.numpy().view(_UNSIGNED[element_size])


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _expect(fits: bool, what: str, payload: np.ndarray, target: torch.Tensor) -> None:
    if not fits:
        raise TransferError(
            f"{what} of {len(payload)} bytes does not fit a chunk of {target.numel()} bytes"
        )
