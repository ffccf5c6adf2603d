"""Runs inside SGLang's own processes: finds where every weight lives, and installs a new version in
place.

SGLang calls `load` through `--custom-weight-loader`, in each tensor-parallel rank, between two
forward steps. A command arrives as the name of an empty tensor. The next version is assembled
beside the old one in shared memory (the shadow) while the engine keeps serving; only `commit`
touches live parameters, by copies inside this process into the same storage. A command that fails
answers with its reason and changes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.engines.probe import probe
from gyre_megatron.errors import GyreError, LayoutError, TransferError
from gyre_megatron.ops.fp8 import quantize_blocks
from gyre_megatron.weights.shadow import SHADOW_FILE, STATUS_FILE, Shadow, checksums, tensor_specs

LOADER = f"{__name__}.load"
"""Pass this to SGLang as --custom-weight-loader."""

SCALE_SUFFIX = "_scale_inv"
"""SGLang names the scales of `x.weight` `x.weight_scale_inv`."""

Parameters = dict[str, torch.Tensor]

_attached: dict[str, Shadow] = {}
"""Directory of a publisher -> its shadow of this process's model."""


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point: run the command in the first tensor's name and write the outcome beside
    the shadow."""
    command = json.loads(named_tensors[0][0])
    rank = _tp_rank()
    directory = Path(command["directory"])
    start = time.perf_counter()
    try:
        answer = _COMMANDS[command["op"]](model, command, rank)
        status = {"ok": True, **answer}
    except (GyreError, OSError, RuntimeError, ValueError, KeyError) as error:
        status = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    status |= {"rank": rank, "serial": command["serial"], "seconds": time.perf_counter() - start}
    _write(directory / STATUS_FILE.format(rank=rank), status)


def _attach(model: torch.nn.Module, command: dict[str, Any], rank: int) -> dict[str, Any]:
    """Describe this rank's parameters and make the shadow for the next version."""
    architecture = Architecture.model_validate(command["architecture"])
    parameters = _parameters(model)
    pieces = probe(model, architecture, parameters)
    specs = tensor_specs({key: _as_received(tensor) for key, tensor in parameters.items()})
    for directory in [
        d for d in _attached if not Path(d).is_dir()
    ]:  # its publisher gave up or is gone
        del _attached[directory]
    path = Path(command["directory"]) / SHADOW_FILE.format(rank=rank)
    _attached[command["directory"]] = Shadow.create(path, specs)
    return {"tensors": [spec._asdict() for spec in specs], "pieces": pieces}


def _verify(model: torch.nn.Module, command: dict[str, Any], rank: int) -> dict[str, Any]:
    """Check the assembled version against the senders' checksums."""
    shadow = _shadow(command)
    expected = command["checksums"]
    if expected is None:
        return {}
    found = checksums(shadow.tensors)
    wrong = [key for key, value in expected[rank].items() if found[key] != value]
    if wrong:
        raise TransferError(
            f"{len(wrong)} tensors arrived damaged on engine rank {rank}, first {wrong[:3]}"
        )
    return {"verified": len(found)}


@torch.no_grad()
def _commit(model: torch.nn.Module, command: dict[str, Any], rank: int) -> dict[str, Any]:
    """Copy the assembled version into the live parameters, keeping their storage; refresh what
    derives from them."""
    shadow = _shadow(command)
    parameters = _parameters(model)
    before = {key: tensor.data_ptr() for key, tensor in parameters.items()}
    scales = {name: p.data for name, p in model.named_parameters() if name.endswith(SCALE_SUFFIX)}
    for key, tensor in parameters.items():
        if tensor.dtype == torch.float8_e4m3fn:
            values, scale = quantize_blocks(shadow.tensors[key].to(tensor.device))
            tensor.copy_(values)
            scales[key + SCALE_SUFFIX].copy_(scale)
        else:
            tensor.copy_(shadow.tensors[key], non_blocking=True)
    _refresh_derived(model)
    moved = [key for key, tensor in _parameters(model).items() if tensor.data_ptr() != before[key]]
    if moved:
        raise TransferError(
            f"refreshing derived tensors moved the storage of {moved[:3]}; captured graphs are "
            "stale"
        )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {"nbytes": shadow.nbytes}


def _refresh_derived(model: torch.nn.Module) -> None:
    """Recompute what SGLang derives from parameters while loading: MLA's split kv_b, norms stored
    minus one."""
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()  # type: ignore[operator]


def _seal(model: torch.nn.Module, command: dict[str, Any], rank: int) -> dict[str, Any]:
    """Nothing: SGLang records the version that comes with this command, after every rank has
    committed."""
    return {}


def _detach(model: torch.nn.Module, command: dict[str, Any], rank: int) -> dict[str, Any]:
    """Drop the shadow, e.g. after a swap that was given up half-way."""
    _attached.pop(command["directory"], None)
    return {}


_COMMANDS: dict[str, Callable[[torch.nn.Module, dict[str, Any], int], dict[str, Any]]] = {
    "attach": _attach,
    "verify": _verify,
    "commit": _commit,
    "seal": _seal,
    "detach": _detach,
}


def _parameters(model: torch.nn.Module) -> Parameters:
    """Live parameters by name, one name per storage (a tied output layer is its embedding), without
    block scales.

    Raises:
        LayoutError: an FP8 weight has no block scale beside it, so this loader does not know how to
        quantise it.
    """
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn and name + SCALE_SUFFIX not in tensors:
            raise LayoutError(
                f"{name} is FP8 without {SCALE_SUFFIX}; only 128 x 128 block scales can be "
                "installed"
            )
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE_SUFFIX)}


def _as_received(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 weights arrive as bf16 and are quantised here, where whole blocks are at hand."""
    return tensor.to("meta", torch.bfloat16) if tensor.dtype == torch.float8_e4m3fn else tensor


def _shadow(command: dict[str, Any]) -> Shadow:
    shadow = _attached.get(command["directory"])
    if shadow is None:
        raise TransferError(
            f"no shadow of {command['directory']} is attached to this engine; attach first"
        )
    return shadow


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _write(path: Path, status: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(status))
    os.replace(partial, path)
