"""Megatron's own account of its shards, assembled from every rank of a layout in one process.

torch's `fake` process group stands for the other ranks: nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.testing._internal.distributed.fake_pg import FakeStore

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training import build_model_chunks
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.checkpoint import box_view
from gyre_megatron.weights.megatron import bind, layout_of
from gyre_megatron.weights.parallel import parallelism_of

Global = dict[str, torch.Tensor]


def canonical_weights(architecture: Architecture) -> Global:
    """A different number in every element of the model."""
    start = 1
    weights = {}
    for name, shape in canonical_tensors(architecture).items():
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    assert start < 1 << 24  # fp32 still tells every one from its neighbours
    return weights


def assembled(architecture: Architecture, training: TrainingConfig, num_ranks: int) -> Global:
    """Megatron's global tensors after our layout has filled every rank's shards.

    Raises:
        AssertionError: two ranks give an element different values, or nobody gives one.
    """
    whole: Global = {}
    for rank in range(num_ranks):
        for shard in _shards_of(architecture, training, rank, num_ranks):
            box = tuple(
                slice(at, at + size)
                for at, size in zip(shard.global_offset, _box_of(shard), strict=True)
            )
            known = whole.setdefault(shard.key, torch.full(shard.global_shape, float("nan")))
            assert known.shape == shard.global_shape, shard.key
            values = shard.data.view(_box_of(shard))
            known_here = known[box]
            assert torch.equal(known_here, values) or known_here.isnan().all(), shard.key
            known[box] = values
    assert not any(values.isnan().any() for values in whole.values())
    return whole


def _box_of(shard: ShardedTensor) -> tuple[int, ...]:
    """Its shape in the global tensor: axes of layers and experts are prepended."""
    return (*(1,) * shard.prepend_axis_num, *shard.local_shape)


def _shards_of(
    architecture: Architecture, training: TrainingConfig, rank: int, num_ranks: int
) -> Iterator[ShardedTensor]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    mpu.initialize_model_parallel(
        training.tp,
        training.pp,
        training.vpp,
        expert_model_parallel_size=training.ep,
        expert_tensor_parallel_size=training.expert_tp if architecture.moe else None,
        create_gloo_process_groups=False,  # those would look for the other ranks
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunks = build_model_chunks(architecture, training)
    _fill(architecture, training, num_ranks // training.min_ranks, chunks, rank)
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    for chunk in chunks:
        for entry in chunk.sharded_state_dict(metadata=metadata).values():
            yield from _built(entry)
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def _built(entry) -> Iterator[ShardedTensor]:
    """The shards of one entry; objects without a shape (extra states) have none."""
    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        for part in built.values() if isinstance(built, dict) else built:
            yield from _built(part)
    elif isinstance(entry, ShardedTensor):
        yield entry


@torch.no_grad()
def _fill(
    architecture: Architecture, training: TrainingConfig, dp: int, chunks: list, rank: int
) -> None:
    place = parallelism_of(training, architecture, dp).rank(rank)
    layout = layout_of(architecture, place, chunks)
    weights = canonical_weights(architecture)
    for key, tensor in bind(layout, place.index, chunks).items():
        tensor.zero_()  # rows that pad the vocabulary
        for local_box in (
            p for t in layout.tensors(place.index) if t.key == key for p in t.local_boxes
        ):
            box = tuple(
                slice(at, at + size)
                for at, size in zip(local_box.start, local_box.shape, strict=True)
            )
            box_view(tensor, local_box).copy_(weights[local_box.name][box])


def main() -> None:
    """Print each case and what differs from one rank's; run in a process of its own."""
    from gyre_megatron.cpu import enable_cpu
    from tests.dist.tiny import CONFIGS

    enable_cpu()
    moe = dict(ep=2, etp=1)
    layouts = {
        "dense": [(dict(tp=2), 2), (dict(pp=2), 2), (dict(tp=2, pp=2), 4), (dict(pp=2, vpp=2), 2)],
        "tied": [(dict(tp=2), 2), (dict(pp=2), 2)],
        "moe": [(moe, 2), (dict(tp=2, **moe), 2), (dict(tp=2, pp=2, **moe), 4)],
        "hybrid": [(dict(tp=2), 2), (dict(pp=2, **moe), 4)],
    }
    for kind, cases in layouts.items():
        architecture = Architecture.from_hf(CONFIGS[kind])
        expected = assembled(architecture, TrainingConfig(), 1)
        for fields, num_ranks in cases:
            found = assembled(architecture, TrainingConfig(**fields), num_ranks)
            names = expected.keys() ^ found.keys()
            shared = expected.keys() & found.keys()
            names |= {name for name in shared if not torch.equal(expected[name], found[name])}
            layout = ",".join(f"{key}{value}" for key, value in fields.items())
            print(f"{kind} {layout} {len(shared)} {sorted(names)}")


if __name__ == "__main__":
    main()
