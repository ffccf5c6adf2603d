"""The benchmark's model and layouts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gyre_megatron.config.model import Architecture, MoeArchitecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training import parallel
from gyre_megatron.training.model import build_model_chunks
from gyre_megatron.weights.boxes import LocalTensor
from gyre_megatron.weights.layout import ListedLayout
from gyre_megatron.weights.megatron import MegatronLayout, bind, layout_of
from gyre_megatron.weights.sglang import SglangLayout

NUM_RANKS = 2


def architecture(scale: str) -> Architecture:
    """A Qwen3-MoE of 0.52B parameters ("1g": 1.04 GB in bf16), or a small one for tests."""
    if scale == "1g":
        return Architecture(
            family="qwen3_moe",
            vocab_size=32_768,
            hidden_size=1024,
            num_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=3072,
            moe=MoeArchitecture(num_experts=32, experts_per_token=4, intermediate_size=512),
        )
    return Architecture(
        family="qwen3_moe",
        vocab_size=1024,
        hidden_size=128,
        num_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=256,
        moe=MoeArchitecture(num_experts=8, experts_per_token=2, intermediate_size=64),
    )


TRAIN = TrainingConfig(tp=1, pp=2, ep=1, etp=1, dtype="bf16")
MEGATRON_TARGET = TrainingConfig(tp=1, pp=1, ep=1, etp=1, dtype="bf16")
"""A layout that `megatron.core.resharding` can reach: experts stay whole, SequentialMLP's are
not renumbered."""
MEGATRON_PAIR = "pp2 -> pp1, dp2"


def build(
    arch: Architecture, config: TrainingConfig
) -> tuple[MegatronLayout, dict[str, torch.Tensor], list]:
    """This rank's layout, live tensors and modules."""
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    parallel.initialize(config, arch)
    # Megatron's own resharding reads shard marks that only initialisation sets
    chunks = build_model_chunks(arch, config)
    place = parallel.parallel_rank(config, arch)
    layout = layout_of(arch, place, chunks)
    tensors = bind(layout, place.index, chunks)
    return layout, tensors, chunks


def fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Random numbers, the same on replicas of one seed only if the shapes agree; the values do not
    matter."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.copy_(
            torch.randint(0, 1 << 15, tensor.shape, generator=generator, dtype=torch.int16).view(
                torch.bfloat16
            )
        )


def serving(arch: Architecture, tp: int, ep: int) -> tuple[SglangLayout, dict[str, torch.Tensor]]:
    """An SGLang layout and this rank's buffers for it."""
    layout = SglangLayout(arch, tp, ep)
    local = layout.tensors(dist.get_rank())
    return layout, {t.key: torch.zeros(t.shape, dtype=torch.bfloat16) for t in local}


def prefixed(layout: SglangLayout) -> ListedLayout:
    """The layout with keys "<rank>/<parameter>", as a publish numbers the engine's ranks."""
    return ListedLayout(
        [
            [
                LocalTensor(
                    f"{rank}/{key}",
                    shape,
                    tuple(box._replace(tensor=f"{rank}/{key}") for box in boxes),
                )
                for key, shape, boxes in layout.tensors(rank)
            ]
            for rank in range(layout.num_ranks)
        ]
    )
