"""What Megatron-Core 0.16 takes for granted inside its own modules and a CPU does not have.

`import_megatron` loads the modules; the table replaces names in them.
"""

from __future__ import annotations

import functools
import queue
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.cpu.adam import GroupStepAdam
from gyre_megatron.cpu.patches import AppliedPatch, Patch


def import_megatron() -> None:
    """Import what the table names without starting a compiler.

    `megatron.core` binds `torch.compile` as its `jit_fuser` while it is imported; each of its 45
    uses would load torch's compiler (three seconds) and compile at the first call.
    """
    compiler: Any = torch.compile
    if "megatron.core" not in sys.modules:
        torch.compile = _compile_nothing  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one each for apex, Transformer Engine and fla
            import megatron.core
            import megatron.core.optimizer
            import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        torch.compile = compiler


def _compile_nothing(model: Any = None, **_: Any) -> Any:
    return _compile_nothing if model is None else model


def disable_jit_fusion() -> list[AppliedPatch]:
    """Give Megatron's modules their plain functions, also those that were imported before."""

    def plain(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    assumption = "that torch.compile is cheap (`jit_fuser`)"
    applied = []
    for owner, name, value in list(_attributes_of_megatron()):
        if name == "jit_fuser":
            replacement: Any = plain
        elif (original := _uncompiled(value)) is not None:
            replacement = staticmethod(original) if isinstance(value, staticmethod) else original
        else:
            continue
        where = owner.__name__ if isinstance(owner, types.ModuleType) else _class_path(owner)
        patch = Patch(where, name, functools.partial(_instead, replacement), assumption)
        applied.append(patch.apply())
    return applied


def _instead(replacement: Any, _original: Any) -> Any:
    return replacement


def _uncompiled(value: Any) -> Callable[..., Any] | None:
    """The function that `torch.compile` wrapped as `value`, if it did."""
    function = value.__func__ if isinstance(value, staticmethod) else value
    if not isinstance(function, types.FunctionType):  # mocks that Megatron makes answer anything
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


def _attributes_of_megatron() -> Iterator[tuple[Any, str, Any]]:
    """(module or class, name, value) of everything that Megatron's imported modules define."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("megatron."):
            continue
        for name, value in vars(module).items():
            yield module, name, value
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, inner in vars(value).items():
                    yield value, attribute, inner


def _class_path(owner: type) -> str:
    return f"{owner.__module__}:{owner.__qualname__}"


def _stay_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def gather(
        x: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    return gather


def _uneven_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scatter(
        x: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(x, group, input_split_sizes, use_global_buffer)
        total = x.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].contiguous()

    return scatter


def _table() -> list[Patch]:
    core = "megatron.core"
    moe = f"{core}.transformer.moe"
    optimizer = f"{core}.optimizer"
    distributed = f"{core}.optimizer.distrib_optimizer"
    random = "that the random state to fork lives on a CUDA device"
    engine = "Transformer Engine (an unbound name without it)"
    splits = "that sizes of splits come from a GPU"
    uneven = "collectives of uneven shards (expert tensor parallelism), which gloo lacks"
    adam = "a fused Adam whose `step` lives in the parameter group, as its checkpoints expect"
    manager = "that a spawned manager process (seconds of imports) must hold a save's results"

    def set_rng_state(state: Any, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    results: queue.Queue = queue.Queue()  # a synchronous save uses it inside one process
    rows: list[tuple[str, str, Callable[[Any], Any], str]] = [
        (f"{core}.tensor_parallel.random", "_set_cuda_rng_state", lambda _: set_rng_state, random),
        (f"{core}.tensor_parallel.random", "_get_cuda_rng_state", lambda _: get_rng_state, random),
        (f"{moe}.moe_utils", "te_general_gemm", lambda original: original, engine),
        (f"{moe}.moe_utils", "maybe_move_tensor_to_cpu", lambda _: _stay_on_cpu, splits),
        (f"{moe}.token_dispatcher", "maybe_move_tensor_to_cpu", lambda _: _stay_on_cpu, splits),
        (f"{core}.tensor_parallel.mappings", "_gather_along_first_dim", _uneven_gather, uneven),
        (
            f"{core}.tensor_parallel.mappings",
            "_reduce_scatter_along_first_dim",
            _uneven_scatter,
            uneven,
        ),
        (optimizer, "Adam", lambda _: GroupStepAdam, adam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", lambda _: False, adam),
        (distributed, "Adam", lambda _: GroupStepAdam, adam),
        (distributed, "HAVE_APEX_OR_TE", lambda _: True, adam),
        (distributed, "USING_APEX_OPTIMIZER", lambda _: True, adam),
        (
            f"{core}.dist_checkpointing.strategies.filesystem_async",
            "_get_write_results_queue",
            lambda _: lambda: results,
            manager,
        ),
    ]
    return [Patch(*row) for row in rows]


MEGATRON_ASSUMPTIONS = _table()
