"""Hidden tests of the package `lru`."""

import pytest

import lru


def test_put_and_get():
    cache = lru.Cache(2)
    cache.put("a", 1)
    assert cache.get("a") == 1 and cache.get("b", 7) == 7 and len(cache) == 1


def test_oldest_goes():
    cache = lru.Cache(2)
    for key in "abc":
        cache.put(key, key)
    assert "a" not in cache and "b" in cache and "c" in cache


def test_get_renews():
    cache = lru.Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert "a" in cache and "b" not in cache


def test_counters():
    cache = lru.Cache(1)
    cache.put("a", 1)
    cache.get("a")
    cache.get("b")
    assert (cache.hits, cache.misses) == (1, 1)


def test_capacity_is_checked():
    with pytest.raises(ValueError):
        lru.Cache(0)


def test_memoize():
    calls = []

    @lru.memoize(2)
    def double(x):
        calls.append(x)
        return 2 * x

    assert [double(1), double(1), double(2)] == [2, 2, 4] and calls == [1, 2]
