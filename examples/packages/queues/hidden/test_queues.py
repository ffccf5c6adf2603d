"""Hidden tests of the package `queues`."""

import pytest

import queues


def queue(*pairs):
    result = queues.PriorityQueue()
    for item, priority in pairs:
        result.push(item, priority)
    return result


def test_order():
    q = queue(("b", 2), ("a", 1), ("c", 3))
    assert [q.pop(), q.pop(), q.pop()] == ["a", "b", "c"]


def test_ties_keep_arrival():
    q = queue(("x", 1), ("y", 1), ("z", 0))
    assert [q.pop(), q.pop(), q.pop()] == ["z", "x", "y"]


def test_peek_and_empty():
    q = queue(("a", 1))
    assert q.peek() == "a" and len(q) == 1
    q.pop()
    with pytest.raises(IndexError):
        q.pop()


def test_push_again_changes_priority():
    q = queue(("a", 1), ("b", 2), ("a", 3))
    assert len(q) == 2 and list(q.drain()) == ["b", "a"]


def test_remove():
    q = queue(("a", 1), ("b", 2))
    assert q.remove("a") and not q.remove("a") and q.peek() == "b" and len(q) == 1


def test_merge():
    one, two = queue(("a", 5), ("b", 1)), queue(("a", 0), ("c", 9))
    assert list(queues.merge(one, two).drain()) == ["a", "b", "c"]
    assert len(one) == 2 and len(two) == 2
