"""What ranks run in the equality tests: losses, log-probabilities and gradients in canonical
names."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training import Trainer
from gyre_megatron.training.pipeline import replica_batches
from gyre_megatron.training.scoring import collect_logprobs
from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.weights.checkpoint import box_view
from gyre_megatron.weights.megatron import bind, layout_of

Canonical = dict[str, torch.Tensor]


def make_trainer(
    checkpoint: Path, config: TrainingConfig, *, with_optimizer: bool = False, family: str = "auto"
) -> Trainer:
    """A trainer in a fresh layout of the pool's ranks."""
    mpu.destroy_model_parallel()
    architecture = Architecture.from_checkpoint(checkpoint, family)
    return Trainer(config, architecture, checkpoint, with_optimizer=with_optimizer)


def canonical_gradients(trainer: Trainer) -> Canonical | None:
    """Whole gradients by canonical name on rank 0; replicas must agree."""
    layout = layout_of(trainer.architecture, trainer.parallel_rank(), trainer.model_chunks)
    place = trainer.parallel_rank().index
    bind(layout, place, trainer.model_chunks)  # checks that the layout describes these modules
    live = dict(trainer.named_parameters())
    mine = [(p.name, p.start, p.shape, box_view(live[p.tensor].main_grad, p).clone()) for p in layout.local_boxes(place)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank():
        return None
    whole: Canonical = {}
    for name, start, shape, values in itertools.chain.from_iterable(everyone):
        known = whole.setdefault(name, torch.full(layout_shape(layout, name), float("nan")))
        box = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        old = known[box]
        if not old.isnan().any():
            torch.testing.assert_close(values, old, rtol=1e-5, atol=1e-6 * float(old.abs().max()))
        known[box] = values
    assert not any(v.isnan().any() for v in whole.values())
    return whole


def layout_shape(layout, name: str) -> tuple[int, ...]:
    from gyre_megatron.weights.canonical import canonical_tensors

    return canonical_tensors(layout.architecture)[name]


def edge_logprobs(trainer: Trainer, bins: list[PackedBin]) -> list:
    """Per bin, the log-probabilities of its edges."""
    batches = replica_batches(bins, trainer.config, trainer.architecture, trainer.device)
    return collect_logprobs(bins, batches, trainer._logprobs(batches), trainer.device)


def run_batches(
    checkpoint: Path,
    config: TrainingConfig,
    batches: list[list[PackedBin]],
    split: int = 1,
    family: str = "auto",
):
    """(loss sums, log-probabilities, gradients) of each batch, taken in `split` micro-steps."""
    trainer = make_trainer(checkpoint, config, family=family)
    results = []
    for bins in batches:
        trainer.begin_batch(weight_version=3)
        sums: dict[str, float] = {}
        for part in range(split):
            for key, value in trainer.micro_step(bins[part::split]).items():
                sums[key] = sums.get(key, 0.0) + value
        trainer.finish_gradients()
        results.append((sums, edge_logprobs(trainer, bins), canonical_gradients(trainer)))
    return results
