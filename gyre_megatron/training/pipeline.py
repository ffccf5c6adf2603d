"""Runs bins through the model with Megatron's pipeline schedules.

Invariant: every rank of the cell is given the same list of bins and derives the same shapes from
it, so that collectives match without talking.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training.tree_batch import FLEX_BLOCK, TreeBatch, make_batch, padded_length
from gyre_megatron.trajectory.packing import PackedBin

LossFunction = Callable[[TreeBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(batch, statistics [3, E]) -> (loss with gradient, what to keep)."""


def replica_batches(
    bins: list[PackedBin], config: TrainingConfig, architecture: Architecture, device: torch.device
) -> list[TreeBatch]:
    """This data-parallel replica's micro-steps of the list: bins[rank::size], filled up with empty
    bins.

    Shapes agree where ranks exchange activations: over a pipeline, and over experts gathered from
    all replicas.
    """
    dp = mpu.get_data_parallel_world_size()
    rank = mpu.get_data_parallel_rank()
    count = -(-len(bins) // dp)
    if config.vpp is not None:  # the interleaved schedule takes micro-steps in groups of pp
        count = -(-count // config.pp) * config.pp
    mine = bins[rank::dp]
    mine += [PackedBin.empty()] * (count - len(mine))
    block = FLEX_BLOCK if device.type == "cuda" else 1
    lengths = [padded_length(b.num_tokens, config.cp, config.tp, block) for b in mine]
    if config.pp > 1 or (config.ep > 1 and config.moe_dispatcher == "allgather"):
        longest = max(b.num_tokens for b in bins)
        lengths = [padded_length(longest, config.cp, config.tp, block)] * count
    replay = None
    if config.router_replay and architecture.moe is not None:
        replay = (
            sum(map(architecture.is_moe_layer, range(architecture.num_layers))),
            architecture.moe.experts_per_token,
        )
    sharded = config.uses_sequence_parallel
    make = partial(make_batch, device=device, sequence_parallel=sharded, block=block, replay=replay)
    return [
        make(b, length, index) for index, (b, length) in enumerate(zip(mine, lengths, strict=True))
    ]


def run_pipeline(
    chunks: list[torch.nn.Module],
    batches: list[TreeBatch],
    loss_function: LossFunction,
    *,
    forward_only: bool,
) -> list:
    """Forward (and backward) over the batches; the last stage returns what `loss_function` kept,
    others nothing."""
    if not batches:
        return []
    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step_of(loss_function),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=batches[0].token_ids.shape[1] * mpu.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def forward_step_of(loss_function: LossFunction) -> Callable:
    """Megatron's `forward_step_func` for models that take a TreeBatch; its data iterator yields
    them."""

    def forward_step(iterator, model):
        batch = next(iterator)
        return model(batch), partial(_as_megatron_loss, loss_function, batch)

    return forward_step


def _as_megatron_loss(loss_function: LossFunction, batch: TreeBatch, statistics: torch.Tensor):
    """Megatron's triple. Edge weights hold every denominator already: a count of 0 tokens makes
    `finalize_model_grads` leave the gradients as they are."""
    loss, kept = loss_function(batch, statistics)
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), kept
