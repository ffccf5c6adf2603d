"""What Megatron-Core finds in `torch.cuda` and torch's factories on a machine without CUDA.

Every entry answers Megatron's own calls only (`for_megatron`); all other code keeps torch as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gyre_megatron.cpu.patches import Patch, called_by_megatron, for_megatron

CPU = torch.device("cpu")
_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "rand",
    "randn",
    "randint",
    "eye",
)


class _Event:
    """A CUDA event on a device where everything has already happened."""

    def record(self, *args: Any) -> _Event:
        return self

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a device that runs in program order."""

    cuda_stream = 0

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_STREAM = _Stream()


def _class_for_megatron(stand_in: type) -> Callable[[Any], type]:
    """A class (Megatron annotates with it) whose instances are stand-ins for Megatron only."""

    def make(original: Any) -> type:
        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            return stand_in() if called_by_megatron(1) else original(*args, **kwargs)

        return type(original.__name__, (), {"__new__": new, "__doc__": original.__doc__})

    return make


def _answer(substitute: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda original: for_megatron(original, substitute)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return for_megatron(original, on_cpu)


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    def cuda_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return for_megatron(original, cuda_name)


def prepare() -> None:
    """Fill torch's list of factories before they are replaced: `with torch.device(...)` must go on
    knowing the functions that the replacements call."""
    _device_constructors()


def _table() -> list[Patch]:
    current = "a current CUDA device"
    streams = "streams and events of a CUDA device"
    memory = "a CUDA allocator with statistics"
    ranges = "profiler ranges of a CUDA device"
    random = "that the random state to keep lives on a CUDA device"
    literal = 'that `device="cuda"` and pinned memory exist'
    moved = "that `.cuda()` moves a tensor and that kernels hold it"
    named = "that `parameter.type()` names a CUDA tensor (its optimizers sort parameters by it)"
    rows: list[tuple[str, str, Callable[[Any], Any], str]] = [
        # Megatron only ever uses the answer as `device=torch.cuda.current_device()`
        ("torch.cuda", "current_device", _answer(lambda: CPU), current),
        ("torch.cuda", "set_device", _answer(_nothing), current),
        ("torch.cuda", "synchronize", _answer(_nothing), streams),
        ("torch.cuda", "Stream", _class_for_megatron(_Stream), streams),
        ("torch.cuda", "Event", _class_for_megatron(_Event), streams),
        ("torch.cuda", "current_stream", _answer(lambda *_, **__: _STREAM), streams),
        ("torch.cuda", "default_stream", _answer(lambda *_, **__: _STREAM), streams),
        ("torch.cuda", "stream", _answer(lambda _: contextlib.nullcontext()), streams),
        ("torch.cuda", "empty_cache", _answer(_nothing), memory),
        ("torch.cuda", "memory_allocated", _answer(lambda *_, **__: 0), memory),
        ("torch.cuda", "max_memory_allocated", _answer(lambda *_, **__: 0), memory),
        ("torch.cuda.nvtx", "range_push", _answer(_nothing), ranges),
        ("torch.cuda.nvtx", "range_pop", _answer(_nothing), ranges),
        ("torch.cuda", "manual_seed", _answer(torch.manual_seed), random),
        ("torch.cuda", "get_rng_state", _answer(lambda *_, **__: torch.get_rng_state()), random),
        ("torch.cuda", "set_rng_state", _answer(_set_rng_state), random),
        ("torch:Tensor", "cuda", _answer(lambda self, *_, **__: self), moved),
        ("torch:Tensor", "record_stream", _answer(_nothing), moved),
        ("torch:Tensor", "type", _type, named),
    ]
    rows += [("torch", name, _factory, literal) for name in _FACTORIES]
    return [Patch(*row) for row in rows]


CUDA_STAND_INS = _table()
