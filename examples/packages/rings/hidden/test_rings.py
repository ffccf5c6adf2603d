"""Hidden tests of the package `rings`."""

import pytest

import rings


def filled(capacity, count):
    ring = rings.Ring(capacity)
    for item in range(count):
        ring.push(item)
    return ring


def test_overwrites_the_oldest():
    assert list(filled(3, 5)) == [2, 3, 4] and len(filled(3, 2)) == 2


def test_index():
    assert filled(3, 5)[0] == 2 and filled(3, 5)[-1] == 4
    with pytest.raises(IndexError):
        filled(3, 1)[1]


def test_push_returns_what_fell_out():
    ring = filled(2, 2)
    assert ring.push(9) == 0 and rings.Ring(1).push(1) is None


def test_full():
    assert filled(2, 2).full and not filled(2, 1).full


def test_resize():
    ring = filled(4, 4)
    ring.resize(2)
    ring.push(9)
    assert list(ring) == [3, 9]


def test_pop():
    assert filled(2, 3).pop() == 1
    with pytest.raises(IndexError):
        rings.Ring(1).pop()


def test_capacity():
    with pytest.raises(ValueError):
        rings.Ring(0)
