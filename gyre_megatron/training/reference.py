"""The reference policy of a KL penalty: the weights training began from, swapped in for a forward
pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ReferencePolicy:
    """A frozen copy of parameter buffers (pinned to their device; costs one more copy of the
    weights)."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._live = buffers
        self._frozen = [b.detach().clone() for b in buffers]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the model has the reference's weights."""
        current = [b.detach().clone() for b in self._live]
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for live, value in zip(self._live, values, strict=True):
            live.copy_(value)
