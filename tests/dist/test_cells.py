"""What crosses cells: gradients reduced to the core, weights down the chain, at every position of
every prefix."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.errors import CellError
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.process_groups import CellTopology, CrossCellGroups


def _groups(store_file: str, num_cells: int) -> CrossCellGroups:
    topology = CellTopology(dist.get_world_size(), num_cells)
    store = dist.FileStore(store_file, dist.get_world_size())
    return CrossCellGroups(store, topology, dist.get_rank(), timedelta(seconds=30))


def _gradients(rank: int) -> torch.Tensor:
    return torch.randn(257, generator=torch.Generator().manual_seed(rank)).round(decimals=2)


def _reduce(store_file: str, num_cells: int) -> dict[int, list[float]]:
    groups, seen = _groups(store_file, num_cells), {}
    for prefix in range(max(1, groups.cell + 1), num_cells + 1):
        mine = _gradients(dist.get_rank())
        groups.reduce_to_core(mine, prefix)
        seen[prefix] = mine.tolist()
    return seen


@pytest.mark.parametrize(("size", "num_cells"), [(4, 2), (3, 3), (4, 4)])
def test_gradients_of_every_prefix_add_up_in_the_core(ranks, tmp_path: Path, size: int, num_cells: int):
    results = ranks(size).run(_reduce, str(tmp_path / "store"), num_cells)
    per_cell = size // num_cells
    for position in range(per_cell):
        for prefix in range(1, num_cells + 1):
            members = [_gradients(cell * per_cell + position) for cell in range(prefix)]
            torch.testing.assert_close(torch.tensor(results[position][prefix]), torch.stack(members).sum(0))


def _chain(store_file: str, num_cells: int, prefix: int) -> list[list[float]]:
    topology = CellTopology(dist.get_world_size(), num_cells)
    store = dist.FileStore(store_file, dist.get_world_size())
    chain = CellChain(WeightsConfig(staging_mib=1), store, topology, dist.get_rank())
    buffers = [_gradients(dist.get_rank()), _gradients(100 + dist.get_rank())[:3].clone()]
    if chain.cell < prefix:
        chain.take_core_weights(buffers, range(1, prefix))
    return [buffer.tolist() for buffer in buffers]


@pytest.mark.parametrize(("size", "num_cells", "prefix"), [(4, 2, 2), (4, 4, 4), (4, 4, 3)])
def test_the_chain_brings_the_cores_shard_to_the_same_position_of_every_cell(
    ranks, tmp_path: Path, size: int, num_cells: int, prefix: int
):
    results = ranks(size).run(_chain, str(tmp_path / "store"), num_cells, prefix)
    per_cell = size // num_cells
    for rank, buffers in enumerate(results):
        source = rank % per_cell if rank // per_cell < prefix else rank
        expected = [_gradients(source).tolist(), _gradients(100 + source)[:3].tolist()]
        assert buffers == expected


def _ask_outside(store_file: str) -> str:
    groups = _groups(store_file, 3)
    if groups.cell < 2:
        return ""
    try:
        groups.reduce_to_core(torch.zeros(1), 2)
    except CellError as error:
        return str(error)
    return "no error"


def test_a_cell_outside_the_prefix_is_refused(ranks, tmp_path: Path):
    told = ranks(3).run(_ask_outside, str(tmp_path / "store"))[2]
    assert told == "cell 2 is not a member of the prefix of 2 cells"
