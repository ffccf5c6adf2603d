"""Runs inside SGLang's own processes: finds where every weight lives, and installs a new version in
place.

SGLang calls `load` through `--custom-weight-loader`, in each tensor-parallel rank, between two
forward steps. A command arrives as the name of an empty tensor. The next version is assembled
beside the old one in shared memory (the shadow) while the engine keeps serving; only `commit`
touches live parameters, by copies inside this process into the same storage.

Invariants: nothing is raised into SGLang, whose scheduler would die of it; what can be refused is
refused at `attach`; a command whose publisher has given up changes nothing.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.engines.fp8_parameters import SCALE_SUFFIX, as_received, check_fp8, install_fp8
from gyre_megatron.engines.probe import probe
from gyre_megatron.errors import LayoutError, TransferError
from gyre_megatron.weights.boxes import LocalBox
from gyre_megatron.weights.messages import (
    CLAIMED_FILE,
    PERMIT_FILE,
    SHADOW_FILE,
    STATUS_FILE,
    Command,
    Status,
    decode_command,
    encode,
)
from gyre_megatron.weights.shadow import Shadow, TensorSpec, checksums, tensor_specs
from gyre_megatron.weights.shared_memory import is_owned

LOADER = f"{__name__}.load"
"""Pass this to SGLang as --custom-weight-loader."""

Parameters = dict[str, torch.Tensor]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Attached:
    """A publisher's shadow of one model of this process."""

    model: weakref.ref[torch.nn.Module]
    shadow: Shadow


@dataclass
class _Answer:
    """What a command has to say beside its success."""

    tensors: list[TensorSpec] = field(default_factory=list)
    local_boxes: list[LocalBox] = field(default_factory=list)
    changed: bool = False
    """Set as soon as live parameters may have been changed, so that it is right in a failure."""


_attached: dict[str, _Attached] = {}
"""By the publisher's directory."""


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point: run the command in the first tensor's name and write the outcome beside
    the shadow. Raises nothing; what cannot be answered goes to SGLang's log."""
    try:
        command = decode_command(named_tensors[0][0])
        _answer(model, command)
    except Exception:
        logger.exception("gyre: a weight command was not answered")


def _answer(model: torch.nn.Module, command: Command) -> None:
    start = time.perf_counter()
    rank = _tp_rank()
    if not is_owned(Path(command.directory)):
        _attached.pop(command.directory, None)
        logger.warning("gyre: weight command %s is stale: its publisher has given up", command.op)
        return
    answer = _Answer()
    error = ""
    try:
        if command.op not in _COMMANDS:
            raise TransferError(f"unknown command {command.op!r}; it knows {', '.join(_COMMANDS)}")
        _COMMANDS[command.op](model, command, rank, answer)
    except Exception as failure:
        # Whatever it is: a model's own load_weights runs in here.
        logger.exception("gyre: weight command %s failed", command.op)
        error = f"{type(failure).__name__}: {failure}"
    status = Status(
        rank=rank,
        serial=command.serial,
        ok=not error,
        error=error,
        seconds=time.perf_counter() - start,
        changed=answer.changed,
        tensors=answer.tensors,
        local_boxes=answer.local_boxes,
    )
    _write(Path(command.directory) / STATUS_FILE.format(rank=rank), status)


def _attach(model: torch.nn.Module, command: Command, rank: int, answer: _Answer) -> None:
    """Describe this rank's parameters and make the shadow for the next version."""
    _refuse_more_models(model, command)
    architecture = Architecture.model_validate(command.architecture)
    parameters = _parameters(model)
    check_fp8(model)
    answer.local_boxes = probe(model, architecture, parameters)
    # Once for certain: what it derives from the weights that are there now is what is there now.
    _refresh_in_place(model, parameters)
    answer.tensors = tensor_specs({key: as_received(t) for key, t in parameters.items()})
    for directory in [d for d in _attached if not is_owned(Path(d))]:
        del _attached[directory]
    path = Path(command.directory) / SHADOW_FILE.format(rank=rank)
    shadow = Shadow.create(path, answer.tensors)
    _attached[command.directory] = _Attached(weakref.ref(model), shadow)


def _refuse_more_models(model: torch.nn.Module, command: Command) -> None:
    """One shadow is for one model: SGLang runs each command once for each model that it serves.

    Raises:
        LayoutError: there is a draft model beside the target, or a pipeline stage.
    """
    other = _attached.pop(command.directory, None)
    first = None if other is None else other.model()
    if first is not None and first is not model:
        raise LayoutError(
            f"the engine serves two models, {type(first).__name__} and {type(model).__name__}; "
            "weights of a draft model are not published: start it without speculative decoding"
        )
    if (stages := _num_stages()) > 1:
        raise LayoutError(
            f"the engine has {stages} pipeline stages; weights are published to one stage: start "
            "it with --pp-size 1 and more tensor parallelism"
        )


def _verify(model: torch.nn.Module, command: Command, rank: int, answer: _Answer) -> None:
    """Check the assembled version against the senders' checksums."""
    shadow = _shadow(command)
    if command.checksums is None:
        return
    expected = command.checksums[rank]
    found = checksums(shadow.tensors)
    unknown = sorted(found.keys() ^ expected.keys())
    if unknown:
        raise TransferError(
            f"{len(unknown)} tensors of engine rank {rank} came without a checksum, first "
            f"{unknown[:3]}: nobody sent them"
        )
    wrong = [key for key, value in expected.items() if found[key] != value]
    if wrong:
        raise TransferError(
            f"{len(wrong)} tensors arrived damaged on engine rank {rank}, first {wrong[:3]}"
        )


@torch.no_grad()
def _commit(model: torch.nn.Module, command: Command, rank: int, answer: _Answer) -> None:
    """Copy the assembled version into the live parameters, keeping their storage; refresh what
    derives from them."""
    shadow = _shadow(command)
    parameters = _parameters(model)
    scales = {name: p.data for name, p in model.named_parameters() if name.endswith(SCALE_SUFFIX)}
    _claim_permit(Path(command.directory))
    answer.changed = True
    for key, tensor in parameters.items():
        if tensor.dtype == torch.float8_e4m3fn:
            install_fp8(shadow.tensors[key], tensor, scales[key + SCALE_SUFFIX])
        else:
            tensor.copy_(shadow.tensors[key], non_blocking=True)
    _refresh_in_place(model, parameters)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _claim_permit(directory: Path) -> None:
    """Make the commit final, or find that the publisher has taken it back.

    The first rank renames the permit, which the publisher would rename, too: exactly one of them
    succeeds, and the other ranks find what was decided.
    """
    try:
        os.rename(directory / PERMIT_FILE, directory / CLAIMED_FILE)
    except FileNotFoundError:
        if not (directory / CLAIMED_FILE).exists():
            raise TransferError("the publisher took its permit back; nothing was changed") from None


def _refresh_in_place(model: torch.nn.Module, parameters: Parameters) -> None:
    """Recompute what SGLang derives from parameters while loading: MLA's split kv_b, norms stored
    minus one.

    Raises:
        LayoutError: a parameter's storage moved, so that captured graphs would read the old one.
    """
    before = {key: tensor.data_ptr() for key, tensor in parameters.items()}
    _refresh_derived(model)
    moved = [key for key, tensor in _parameters(model).items() if tensor.data_ptr() != before[key]]
    if moved:
        raise LayoutError(
            f"refreshing derived tensors moved the storage of {moved[:3]}; captured graphs are "
            "stale"
        )


def _refresh_derived(model: torch.nn.Module) -> None:
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()  # type: ignore[operator]


def _seal(model: torch.nn.Module, command: Command, rank: int, answer: _Answer) -> None:
    """Nothing: SGLang records the version that comes with this command, after every rank has
    committed."""


_COMMANDS: dict[str, Callable[[torch.nn.Module, Command, int, _Answer], None]] = {
    "attach": _attach,
    "verify": _verify,
    "commit": _commit,
    "seal": _seal,
}


def _parameters(model: torch.nn.Module) -> Parameters:
    """Live parameters by name, one name per storage (a tied output layer is its embedding), without
    block scales."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE_SUFFIX)}


def _shadow(command: Command) -> Shadow:
    attached = _attached.get(command.directory)
    if attached is None:
        raise TransferError(
            f"no shadow of {command.directory} is attached to this engine; attach first"
        )
    return attached.shadow


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _num_stages() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _write(path: Path, status: Status) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(status))
    os.replace(partial, path)
