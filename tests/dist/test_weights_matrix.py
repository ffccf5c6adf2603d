"""Bit-exact resharding between layouts of real Megatron models and SGLang's layouts, there and
back, over 8 ranks."""

from __future__ import annotations

import os

import pytest

from gyre_megatron.weights.parallel import Parallelism as P
from tests.dist.reshard_jobs import Serve, Train, gather, pair_and_back

UNEVEN = (((0,),), ((1, 2, 3),))

TP2PP2, TP4, PP4 = Train(P(tp=2, pp=2, dp=2)), Train(P(tp=4, dp=2)), Train(P(pp=4, dp=2))
VPP, CP, TP4PP2 = Train(P(pp=2, vpp=2, dp=4)), Train(P(tp=2, cp=2, dp=2)), Train(P(tp=4, pp=2))
FIRST = Train(P(tp=2, pp=2, dp=2), first_replica=True)
EXPERT = Train(P(tp=2, pp=2, dp=2, ep=2, etp=1))
EP8 = Train(P(dp=8, ep=8), "te_grouped")
ETP2 = Train(P(tp=2, dp=4, ep=4, etp=2), "grouped")
PP2EP4 = Train(P(pp=2, dp=4, ep=4), "te_grouped")
UNEVEN_TRAIN = Train(P(tp=2, pp=2, dp=2, stage_layers=UNEVEN))
UNEVEN_EXPERT = Train(P(pp=2, dp=4, ep=2, stage_layers=UNEVEN), "grouped")

DENSE = [
    (TP2PP2, Serve(tp=8)),  # more ranks than key/value heads
    (TP4PP2, Serve(tp=2)), (PP4, Serve(tp=4)), (VPP, Serve(tp=8)), (CP, Serve(tp=1)), (UNEVEN_TRAIN, Serve(tp=4)),
    (FIRST, Serve(tp=8)), (TP4, Serve(tp=4, attention_dp=2)), (TP2PP2, TP4), (UNEVEN_TRAIN, TP4PP2), (VPP, PP4),
    (FIRST, CP), (Train(P(tp=8)), TP2PP2),  # Megatron with more ranks than key/value heads
]
TIED = [(TP2PP2, Serve(tp=8)), (PP4, Serve(tp=2)), (VPP, TP4)]
MTP = [(TP2PP2, TP4), (PP4, TP2PP2)]
MOE = [
    (EXPERT, Serve(tp=4, ep=4)), (EP8, Serve(tp=8, ep=2)), (ETP2, Serve(tp=2)), (PP2EP4, Serve(tp=8, ep=8)),
    (EXPERT, Serve(tp=4, ep=2, attention_dp=2)), (UNEVEN_EXPERT, Serve(tp=8, ep=4)), (EXPERT, EP8), (ETP2, PP2EP4),
    (UNEVEN_EXPERT, EXPERT),
]
MLA = [
    (EXPERT, Serve(tp=4, ep=2)), (EP8, Serve(tp=8, ep=8, attention_dp=8)), (ETP2, Serve(tp=2)), 
    (UNEVEN_EXPERT, Serve(tp=8)), (EXPERT, PP2EP4), (TP4, EP8),
]
HYBRID = [
    (EXPERT, Serve(tp=4, ep=2)),  # more ranks than key/value heads
    (PP2EP4, Serve(tp=2)), (UNEVEN_EXPERT, Serve(tp=4, ep=4)), (EP8, Serve(tp=4, ep=4, attention_dp=4)), (EXPERT, EP8),
    (Train(P(tp=2, dp=4, ep=4, etp=2), "grouped"), UNEVEN_EXPERT),
]

PAIRS = [
    pytest.param(family, source, target, id=f"{family}{i}")
    for family, pairs in dict(dense=DENSE, tied=TIED, mtp=MTP, moe=MOE, mla=MLA, hybrid=HYBRID).items()
    for i, (source, target) in enumerate(pairs)
]
CARRIERS = [("ipc", 256), ("collective", 64), ("ipc", 8192), ("file", 1024), ("collective", 4096)]


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory):
    os.environ["RESHARD_TMP"] = str(tmp_path_factory.mktemp("reshard"))


def test_matrix_is_large_enough():
    assert len(PAIRS) >= 30


@pytest.mark.parametrize(("family", "source", "target"), PAIRS)
def test_pair_and_back(ranks, request, family, source, target):
    number = [p.id for p in PAIRS].index(request.node.callspec.id)
    kind, staging_kib = CARRIERS[number % len(CARRIERS)]
    for there, back, staging in ranks(8).run(pair_and_back, family, source, target, kind, staging_kib):
        assert (there, back) == ([], [])
        assert staging <= staging_kib << 10


@pytest.mark.parametrize("family", ["dense", "moe", "mla", "hybrid"])
def test_gather_to_one_rank(ranks, family):
    source = TP2PP2 if family == "dense" else EXPERT
    assert ranks(8).run(gather, family, source, "ipc") == [[]] * 8
