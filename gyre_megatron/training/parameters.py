"""Contiguous views of a rank's parameters and gradients: what travels between cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

PERSISTENT_BUFFERS = ("expert_bias",)
"""Buffers that are part of the model's state: DeepSeek's load-balancing bias of the router."""


def flatten_parameters(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Move every parameter into one flat buffer per dtype, in place, and return the buffers.

    Same order, shapes and dtypes on every rank that holds the same shard, so buffers can be sent
    whole.
    """
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in itertools.chain.from_iterable(chunk.parameters() for chunk in chunks):
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    buffers = []
    for parameters in by_dtype.values():
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        for view, parameter in zip(
            flat.split([p.numel() for p in parameters]), parameters, strict=True
        ):
            parameter.data = view.view(parameter.shape)
        buffers.append(flat)
    return buffers


def persistent_buffers(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Model state that is not a parameter."""
    named = itertools.chain.from_iterable(chunk.named_buffers() for chunk in chunks)
    return [buffer for name, buffer in named if name.rsplit(".", 1)[-1] in PERSISTENT_BUFFERS]


def gradient_buffers(wrapped: Iterable[DistributedDataParallel]) -> list[torch.Tensor]:
    """Megatron's fp32 gradient buffers, dense parameters before experts."""
    return [
        b.grad_data for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def parameter_buffers_of(wrapped: Iterable[DistributedDataParallel]) -> list[torch.Tensor]:
    """Parameter buffers that DistributedDataParallel made itself (distributed optimizer); empty
    otherwise."""
    buffers = [
        b.param_data for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return [b for b in buffers if b is not None]


def named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names as the weights room knows them: `<chunk>.<name in the chunk>`."""
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield f"{index}.{name}", parameter
