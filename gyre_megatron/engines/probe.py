"""A dry run of SGLang's own weight loading: which box of which checkpoint tensor lands where in
which parameter.

The model's `load_weights` is called with checkpoint tensors that have a shape but no data. Every
copy that it would make into a parameter is recorded and not made, so the live weights stay as they
are. The engine's fusions, shards and replications are thereby read off, never guessed; a tensor
that the model transforms by arithmetic, or a parameter that nothing fills, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Index, LocalBox, contiguous_strides
from gyre_megatron.weights.canonical import canonical_tensors

aten = torch.ops.aten

_ALIASING = {aten._to_copy.default, aten.clone.default, aten.contiguous.default}
"""Operators whose result, for a tensor without data, may be taken as the same elements in the same
order."""


class _Recorder(TorchDispatchMode):
    """Records copies from named source tensors into named parameters, and suppresses all writes to
    parameters."""

    def __init__(self, sources: dict[int, str], targets: dict[int, str]) -> None:
        super().__init__()
        self._sources = sources
        self._targets = targets
        self.copies: list[tuple[str, torch.Tensor, str, torch.Tensor]] = []
        self._joined: dict[int, tuple[torch.Tensor, int, list[torch.Tensor]]] = {}
        """Storage of a concatenation -> (it, kept alive; dimension; parts)."""
        self.cleared: dict[str, int] = {}
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and func in _ALIASING and _storage(first) in self._sources:
            return first
        if func is aten.cat.default and all(_storage(part) in self._sources for part in args[0]):
            joined = func(*args, **kwargs)
            self._joined[_storage(joined)] = (
                joined,
                args[1] if len(args) > 1 else kwargs.get("dim", 0),
                args[0],
            )
            return joined
        target = (
            self._targets.get(_storage(first))
            if first is not None and func._schema.is_mutable
            else None
        )
        if target is None or first is None:
            return func(*args, **kwargs)
        if first.numel() == 0:  # a rank that holds only padding copies nothing
            return first
        if func is aten.copy_.default:
            self._record_copy(target, first, args[1])
        else:
            self.cleared[target] = self.cleared.get(target, 0) + first.numel()
        return first

    def _record_copy(self, target: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(_storage(source))
        joined = self._joined.get(_storage(source))
        if name is not None:
            self.copies.append((name, source, target, destination))
        elif joined is not None and joined[0].shape == source.shape and source.is_contiguous():
            sizes = [part.shape[joined[1]] for part in joined[2]]
            for part, place in zip(joined[2], destination.split(sizes, joined[1]), strict=True):
                self._record_copy(target, place, part)
        else:
            self.refused.append(target)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def probe(
    model: torch.nn.Module, architecture: Architecture, parameters: dict[str, torch.Tensor]
) -> list[LocalBox]:
    """Where every part of the checkpoint lands in `parameters`.

    Raises:
        LayoutError: a parameter is filled by nothing, filled from a transformed tensor, or cut in a
        way that is not
            a box of the checkpoint tensor; the message names it.
    """
    shapes = canonical_tensors(architecture)
    dtype = next(iter(parameters.values())).dtype
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    targets = {_storage(tensor): key for key, tensor in reversed(parameters.items())}
    with (
        _Recorder({_storage(t): n for n, t in sources.items()}, targets) as recorder,
        torch.no_grad(),
    ):
        model.load_weights(iter(sources.items()))  # type: ignore[operator]
    if recorder.refused:
        raise LayoutError(
            f"{recorder.refused[0]} is filled by the engine from a transformed tensor; "
            f"{len(recorder.refused)} "
            "parameters have no plan and cannot be hot-swapped"
        )
    local_boxes: list[LocalBox] = []
    for name, source, key, destination in recorder.copies:
        local_boxes += _boxes_of(name, shapes[name], source, key, destination)
    _check_filled(parameters, local_boxes, recorder.cleared)
    return local_boxes


def _check_filled(
    parameters: dict[str, torch.Tensor], local_boxes: list[LocalBox], cleared: dict[str, int]
) -> None:
    filled: dict[str, int] = dict(cleared)
    for box in local_boxes:
        filled[box.tensor] = filled.get(box.tensor, 0) + box.numel
    wrong = [
        f"{k} ({filled.get(k, 0)} of {p.numel()})"
        for k, p in parameters.items()
        if filled.get(k, 0) != p.numel()
    ]
    if wrong:
        raise LayoutError(
            f"{len(wrong)} engine parameters are not filled exactly once by the checkpoint's "
            f"tensors: {wrong[:4]}; "
            "their plan is missing"
        )


def _boxes_of(
    name: str, shape: Index, source: torch.Tensor, key: str, destination: torch.Tensor
) -> Iterator[LocalBox]:
    """One recorded copy as boxes: dimensions are merged, then matched with the checkpoint tensor's
    own."""
    if source.shape != destination.shape:
        source = source.expand(destination.shape)
    dims = [
        (n, s, d)
        for n, s, d in zip(source.shape, source.stride(), destination.stride(), strict=True)
        if n != 1
    ]
    merged: list[tuple[int, int, int]] = []
    for n, s, d in dims:
        if merged and merged[-1][1] == n * s and merged[-1][2] == n * d:
            merged[-1] = (merged[-1][0] * n, s, d)
        else:
            merged.append((n, s, d))
    strides = contiguous_strides(shape)
    placed, loose = _match(merged, shape, strides)
    for index in product(*(range(n) for n, _, _ in loose)):
        shift_source = sum(i * s for i, (_, s, _) in zip(index, loose, strict=True))
        shift_target = sum(i * d for i, (_, _, d) in zip(index, loose, strict=True))
        start = _unravel(int(source.storage_offset()) + shift_source, strides)
        sizes = tuple(placed[dim][0] if dim in placed else 1 for dim in range(len(shape)))
        steps = tuple(placed[dim][1] if dim in placed else 0 for dim in range(len(shape)))
        if any(at + size > whole for at, size, whole in zip(start, sizes, shape, strict=True)):
            raise LayoutError(f"{key} takes elements of {name} that do not form a box")
        offset = int(destination.storage_offset()) + shift_target
        yield LocalBox(name, start, sizes, key, offset, steps)


def _match(
    merged: list[tuple[int, int, int]], shape: Index, strides: Index
) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int, int]]]:
    """Give each merged dimension the checkpoint dimension of equal stride; split what spans
    several."""
    placed: dict[int, tuple[int, int]] = {}
    loose: list[tuple[int, int, int]] = []
    queue = list(merged)
    while queue:
        n, s, d = queue.pop(0)
        dim = next(
            (k for k in range(len(shape)) if shape[k] > 1 and strides[k] == s and k not in placed),
            None,
        )
        if dim is None:
            loose.append((n, s, d))
        elif n > shape[dim] and n % shape[dim] == 0:
            placed[dim] = (shape[dim], d)
            queue.append((n // shape[dim], s * shape[dim], d * shape[dim]))
        else:
            placed[dim] = (n, d)
    return placed, loose


def _unravel(offset: int, strides: Index) -> Index:
    start = []
    for stride in strides:
        start.append(offset // stride if stride else 0)
        offset -= start[-1] * stride
    return tuple(start)
