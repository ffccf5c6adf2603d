"""Hidden tests of the package `tables`."""

import pytest

import tables


def test_plain():
    assert tables.render([["a", 1], ["bbb", 22]]) == "a   | 1\nbbb | 22"


def test_headers():
    assert tables.render([["x", 1]], headers=["name", "n"]) == "name | n\n-----+--\nx    | 1"


def test_align():
    assert tables.render([["a", "b"], ["ccc", "ddd"]], align="rc") == "  a |  b\nccc | ddd"


def test_ragged():
    with pytest.raises(ValueError):
        tables.render([[1], [1, 2]])


def test_parse():
    text = tables.render([["x", 1], ["y", 2]], headers=["name", "n"])
    assert tables.parse(text) == [{"name": "x", "n": "1"}, {"name": "y", "n": "2"}]


def test_group_by():
    rows = [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}, {"k": 1, "v": "c"}]
    assert tables.group_by(rows, "k") == {1: [rows[0], rows[2]], 2: [rows[1]]}
