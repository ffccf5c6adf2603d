"""Checkpoints in Megatron's torch_dist format: readable in another parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from gyre_megatron.errors import CheckpointError

_MAX_REASON = 300  # torch's messages list every key of the checkpoint


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def _sharded(chunk: Any) -> dict[str, Any]:
    return chunk.sharded_state_dict(metadata=_metadata())


def _state(
    chunks: Sequence[torch.nn.Module], optimizer, lr_schedule, *, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{i}" if len(chunks) > 1 else "model": _sharded(chunk)
        for i, chunk in enumerate(chunks)
    }
    if optimizer is not None:
        models = {k: v for k, v in state.items() if k.startswith("model")}
        model = models if len(chunks) > 1 else models["model"]
        state["optimizer"] = optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_metadata()
        )
        state["lr_schedule"] = lr_schedule.state_dict()
    return state


def save(directory: str | Path, chunks: Sequence[torch.nn.Module], optimizer, lr_schedule) -> None:
    """Collective over the cell; the directory must exist and be empty."""
    dist_checkpointing.save(
        _state(chunks, optimizer, lr_schedule, is_loading=False), str(directory)
    )


def load(directory: str | Path, chunks: Sequence[torch.nn.Module], optimizer, lr_schedule) -> None:
    """Collective over the cell; a cell without an optimizer reads the weights alone.

    Raises:
        CheckpointError: there is no complete checkpoint at `directory`, or it is another model's.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointError(
            f"{directory} holds no complete Megatron checkpoint (no metadata.json); choose another"
        )
    state = _state(chunks, optimizer, lr_schedule, is_loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(directory))
    except (CheckpointException, CheckpointingException) as error:
        raise CheckpointError(
            f"{directory} cannot be read into this model: {_reason(error)}; it is damaged, or "
            "another model's"
        ) from error
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}" if len(chunks) > 1 else "model"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        lr_schedule.load_state_dict(loaded["lr_schedule"])


def _reason(error: CheckpointException | CheckpointingException) -> str:
    """What went wrong on the first rank that failed, in few words."""
    if isinstance(error, CheckpointException):
        (failure, _), *_ = error.failures.values()
        return f"{type(failure).__name__}: {failure}"[:_MAX_REASON]
    return str(error)[:_MAX_REASON]
