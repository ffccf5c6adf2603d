"""Deltas down a chain of three cells: exact in every version, small where little changed, whole
where the cells do not hold what the core sent last."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.delta_chain import Versions
from gyre_megatron.weights.process_groups import CellTopology
from tests.dist.ranks import RankPool

NUM_CELLS = 3
CONFIG = WeightsConfig(delta=True, staging_mib=4, timeout_s=30)
NUM_BYTES = 2 * 200_000 + 4 * 33


@pytest.fixture(scope="module")
def cells():
    pool = RankPool(NUM_CELLS)
    yield pool
    pool.close()


def weights_of(version: int, share: float = 0.03) -> list[torch.Tensor]:
    """The core's weights at a version: each changes about `share` of the elements of the last."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator).bfloat16()
    bits = values.view(torch.int16)
    for _ in range(version):
        chosen = torch.rand(len(bits), generator=generator) < share
        bits[chosen] ^= torch.randint(1, 2**15, (int(chosen.sum()),), generator=generator).short()
    return [values, torch.full((33,), float(version))]


def chain_of(name: str) -> CellChain:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return CellChain(CONFIG, store, CellTopology(NUM_CELLS, NUM_CELLS), dist.get_rank())


def equal(mine: list[torch.Tensor], version: int, share: float = 0.03) -> bool:
    pairs = zip(mine, weights_of(version, share), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def many_versions(name: str, num: int) -> tuple[list[bool], list[int]]:
    chain = chain_of(name)
    mine = [torch.zeros(200_000, dtype=torch.bfloat16), torch.zeros(33)]
    exact, sizes = [], []
    for version in range(1, num + 1):
        if chain.cell == 0:
            mine = weights_of(version)
        versions = Versions(version if chain.cell == 0 else version - 1, version)
        sizes.append(chain.take_core_weights(mine, (1, 2), versions))
        exact.append(equal(mine, version))
    return exact, sizes


def test_every_version_is_exact_and_small(cells: RankPool):
    results = cells.run(many_versions, "many", 12)
    assert all(all(exact) for exact, _ in results)
    for _, sizes in results:
        assert sizes[0] == NUM_BYTES  # nobody held anything that the core had sent
        assert all(size < 0.07 * NUM_BYTES for size in sizes[1:])


def steps(name: str) -> list[tuple[int, bool]]:
    """Bytes and exactness of: whole, nothing changed, too much changed, one cell behind, and a
    delta that two versions went into."""
    chain = chain_of(name)
    satellite = chain.cell != 0
    mine = [torch.zeros(200_000, dtype=torch.bfloat16), torch.zeros(33)]
    held, found = -1, []
    plan = [(1, 0.03, None), (1, 0.03, None), (2, 0.9, None), (3, 0.03, 2), (5, 0.03, None)]
    for version, share, behind in plan:
        if not satellite:
            mine = weights_of(version, share)
        claimed = 0 if behind == chain.cell else held
        size = chain.take_core_weights(mine, (1, 2), Versions(claimed, version))
        held = version
        found.append((size, equal(mine, version, share)))
    return found


def test_what_is_not_worth_it_or_not_possible_goes_whole(cells: RankPool):
    for found in cells.run(steps, "steps"):
        sizes = [size for size, _ in found]
        assert all(exact for _, exact in found)
        assert sizes[0] == sizes[2] == sizes[3] == NUM_BYTES
        assert sizes[1] < 100  # the announcement alone
        assert sizes[4] < 0.13 * NUM_BYTES


def liar(name: str) -> str:
    chain = chain_of(name)
    mine = weights_of(1)
    chain.take_core_weights(mine, (1, 2), Versions(0, 1))
    if chain.cell == 0:
        mine = weights_of(2)
    if chain.cell == 2:
        mine[0][7] = 100.0  # not version 1 any more
    try:
        chain.take_core_weights(mine, (1, 2), Versions(1, 2))
        return "taken" if equal(mine, 2) else "wrong"
    except TransferError as error:
        return str(error)


def test_a_cell_that_does_not_hold_what_it_says_is_told(cells: RankPool):
    told = cells.run(liar, "liar")
    assert told[1] == "taken" and "did not hold the version" in told[2]
