"""Copy thousands of strided boxes between lists of tensors in one call (csrc: boxes).

A table has one row of int64 per box: `[source index, source offset, target index, target offset, shape x 3,
source strides x 3, target strides x 3]`, offsets and strides in elements, missing leading dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

COLUMNS = 13


def copy_boxes_reference(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor) -> None:
    """What `copy_boxes` does, box by box in plain PyTorch."""
    for si, so, ti, to, *rest in table.tolist():
        shape, source_strides, target_strides = rest[:3], rest[3:6], rest[6:9]
        source, target = sources[si], targets[ti]
        view = source.as_strided(shape, source_strides, source.storage_offset() + so)
        target.as_strided(shape, target_strides, target.storage_offset() + to).copy_(view)


copy_boxes = copy_boxes_reference
