"""Layouts from numbers alone: what every rank must agree on, what may differ, and what is
refused."""

from __future__ import annotations

import pytest

from gyre_megatron.config.model import Architecture, MoeArchitecture
from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.megatron import MegatronLayout
from gyre_megatron.weights.megatron_names import MegatronStyle
from gyre_megatron.weights.parallel import Parallelism
from gyre_megatron.weights.planner import check_coverage, plan_rank
from gyre_megatron.weights.sglang import SglangLayout

MOE = Architecture(
    family="qwen3_moe",
    vocab_size=100,
    hidden_size=32,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=64,
    moe=MoeArchitecture(num_experts=8, experts_per_token=2, intermediate_size=16),
)


def test_ranks_agree_on_the_digest_whatever_their_stage_shows_of_the_style():
    p = Parallelism(tp=2, pp=4, ep=2, etp=1)
    seen = [MegatronStyle("te_grouped", padded_vocab_size=100), MegatronStyle()]
    assert len({MegatronLayout(MOE, p, style).digest() for style in seen}) == 1
    assert (
        MegatronLayout(MOE, Parallelism(tp=2, pp=2, ep=2, etp=1)).digest()
        != MegatronLayout(MOE, p).digest()
    )


@pytest.mark.parametrize("style", ["sequential", "te_grouped", "grouped"])
@pytest.mark.parametrize(
    "p",
    [
        Parallelism(tp=2, pp=2, ep=2, etp=1),
        Parallelism(pp=4, dp=2, ep=2),
        Parallelism(tp=8),
        Parallelism(tp=2, cp=2, dp=2, ep=4, etp=2),
    ],
)
def test_every_canonical_element_is_held_and_reaches_every_engine(p, style):
    layout = MegatronLayout(MOE, p, MegatronStyle(style, padded_vocab_size=104))
    held = {name for rank in range(layout.num_ranks) for name in layout.names(rank)}
    assert held == set(canonical_tensors(MOE))
    for rank in range(layout.num_ranks):  # what a rank lists is what the layout says about it
        for name in layout.names(rank):
            assert any(rank in shard.ranks for shard in layout.shards(name))
    engine = SglangLayout(MOE, 4, 2)
    for rank in range(4):
        plan = plan_rank(layout, engine, rank)
        check_coverage(
            engine, rank, [x for parcels in plan.receives.values() for x in parcels] + plan.local
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MegatronLayout(MOE, Parallelism(pp=3)), "4 layers do not divide over pp=3"),
        (lambda: Parallelism(tp=2, ep=4), "not a multiple of etp\\*ep"),
        (lambda: Parallelism(tp=0), "must be at least 1"),
        (
            lambda: MegatronLayout(MOE, Parallelism(tp=3, etp=1, ep=1)).tensors(0),
            "rows cannot hold 100 tokens over tp=3",
        ),
        (
            lambda: MegatronLayout(MOE, Parallelism(dp=3, ep=3)).tensors(0),
            "8 experts do not divide over ep=3",
        ),
        (lambda: SglangLayout(MOE, 4, 3), "must divide tp=4"),
        (lambda: SglangLayout(MOE, 32).tensors(0), "does not divide over 32 ranks"),
        (
            lambda: MegatronLayout(MOE, Parallelism(pp=2, stage_layers=(((0, 1),), ((1, 2, 3),)))),
            "stage_layers must list layers 0..3 once",
        ),
    ],
)
def test_impossible_layouts_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
