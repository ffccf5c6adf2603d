"""Lets Megatron-Core 0.16 run on CPU with gloo; does nothing where a CUDA device exists.

Called by `gyre_megatron.training` before anything imports megatron. Each function below mends one
assumption that Megatron makes about its device; its docstring names the assumption.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import queue
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from gyre_megatron.errors import VersionError

CPU = torch.device("cpu")
TESTED = "0.16"
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
_installed = False


def install() -> None:
    """Mend Megatron-Core's device assumptions once per process.

    Raises:
        VersionError: megatron-core is missing or is not the version this layer was written for.
    """
    global _installed
    _check_version()
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _cuda_runtime()
    _tensor_factories()
    _import_without_compile()
    _random_state()
    _moe_dispatch()
    _uneven_collectives()
    _adam()
    _checkpoint_queue()


def _check_version() -> None:
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise VersionError("megatron-core is not installed; run `make setup`") from error
    if not version.startswith(TESTED + "."):
        raise VersionError(
            f"megatron-core {version} was found, {TESTED}.x was tested; run `make setup`"
        )


class _Event:
    """A CUDA event on a device where everything has already happened."""

    def __init__(self, *args, **kwargs) -> None: ...

    def record(self, *args) -> _Event:
        return self

    def wait(self, *args) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a device that runs in program order."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, *args) -> None: ...

    def wait_event(self, *args) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _cuda_runtime() -> None:
    """Assumes a current CUDA device, streams, events, memory statistics and profiler ranges."""
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: CPU  # only ever used as `device=torch.cuda.current_device()`
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *args, **kwargs: 0
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(
        state
    )


def _is_cuda(device) -> bool:
    return torch.device(device).type == "cuda" if isinstance(device, str | torch.device) else False


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _tensor_factories() -> None:
    """Assumes literal `device="cuda"`, `.cuda()`, and that `param.type()` names a CUDA tensor."""
    _device_constructors()  # cached: `with torch.device(...)` must go on knowing the factories that wrappers call
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    original = torch.Tensor.type

    def typed(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    torch.Tensor.type = typed  # type: ignore[assignment]


def _import_without_compile() -> None:
    """Assumes torch.compile is cheap: `jit_fuser` binds it at import and would start a compiler per
    function."""
    compile_ = torch.compile
    torch.compile = lambda fn=None, **kwargs: fn if fn is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            import megatron.core.optimizer
            import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        torch.compile = compile_  # type: ignore[assignment]


def _random_state() -> None:
    """Assumes the random state to fork lives on a CUDA device."""
    import megatron.core.tensor_parallel.random as random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )


def _moe_dispatch() -> None:
    """Assumes Transformer Engine (an unbound name without it) and that split sizes come from a
    GPU."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def maybe_move(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = maybe_move


def _uneven_collectives() -> None:
    """Assumes all-gather and reduce-scatter of uneven shards (expert tensor parallelism), which
    gloo lacks."""
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather, even_scatter = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def gather(x, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def scatter(x, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def _adam() -> None:
    """Assumes a fused Adam whose `step` lives in the parameter group (checkpoints of the optimizer
    rely on it)."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    from gyre_megatron.cpu.adam import GroupStepAdam

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = (
        GroupStepAdam,
        True,
        True,
    )


def _checkpoint_queue() -> None:
    """Assumes a spawned manager process (seconds of imports) for a queue that a synchronous save
    uses in-process."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    results: queue.Queue = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
