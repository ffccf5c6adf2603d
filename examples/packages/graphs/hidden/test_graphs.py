"""Hidden tests of the package `graphs`."""

import pytest

import graphs

GRAPH = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "x": ["y"]}


def test_nodes():
    assert graphs.nodes(GRAPH) == ["a", "b", "c", "d", "x", "y"]


def test_topological():
    assert graphs.topological(GRAPH) == ["a", "b", "c", "d", "x", "y"]


def test_cycle():
    with pytest.raises(graphs.CycleError):
        graphs.topological({"a": ["b"], "b": ["a"]})


def test_shortest_path():
    assert graphs.shortest_path({1: [2, 3], 2: [4], 3: [5], 4: [5]}, 1, 5) == [1, 3, 5]


def test_no_path():
    assert graphs.shortest_path(GRAPH, "a", "y") is None


def test_components():
    assert graphs.components(GRAPH) == [["a", "b", "c", "d"], ["x", "y"]]
