"""Pools of ranks shared by the tests of this folder."""

from __future__ import annotations

import pytest

from tests.dist.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: the pool of n ranks."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.close()
