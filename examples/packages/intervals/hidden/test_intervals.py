"""Hidden tests of the package `intervals`."""

import pytest

import intervals


def test_merge_overlapping():
    assert intervals.merge([(5, 8), (1, 3), (2, 4)]) == [(1, 4), (5, 8)]


def test_merge_touching():
    assert intervals.merge([(1, 2), (2, 3)]) == [(1, 3)]


def test_contains_is_half_open():
    assert intervals.contains([(1, 3)], 1) and not intervals.contains([(1, 3)], 3)


def test_subtract_splits():
    assert intervals.subtract([(0, 10)], [(2, 3), (5, 7)]) == [(0, 2), (3, 5), (7, 10)]


def test_subtract_all():
    assert intervals.subtract([(2, 3)], [(0, 10)]) == []


def test_empty_interval_is_refused():
    with pytest.raises(ValueError):
        intervals.merge([(3, 3)])
