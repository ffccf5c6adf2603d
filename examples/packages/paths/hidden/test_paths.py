"""Hidden tests of the package `paths`."""

import pytest

import paths

DATA = {"a": {"b": [{"c": 1}, 2]}, "x": None}


def test_get():
    assert paths.get(DATA, "a.b[0].c") == 1 and paths.get(DATA, "a.b[1]") == 2


def test_default():
    assert paths.get(DATA, "a.z.q", 7) == 7 and paths.get(DATA, "a.b[9]") is None


def test_none_is_a_value():
    assert paths.get(DATA, "x", 7) is None


def test_set():
    data = {}
    paths.set(data, "a.b[0].c", 5)
    paths.set(data, "a.b[1]", 6)
    assert data == {"a": {"b": [{"c": 5}, 6]}}
    with pytest.raises(IndexError):
        paths.set(data, "a.b[9]", 1)


def test_delete():
    data = {"a": [1, 2, 3]}
    paths.delete(data, "a[1]")
    assert data == {"a": [1, 3]}
    with pytest.raises(KeyError):
        paths.delete(data, "b")


def test_flatten():
    assert paths.flatten(DATA) == {"a.b[0].c": 1, "a.b[1]": 2, "x": None}


@pytest.mark.parametrize("path", ["", "a..b", "a[", "[x]", "a b"])
def test_malformed(path):
    with pytest.raises(ValueError):
        paths.get(DATA, path)
