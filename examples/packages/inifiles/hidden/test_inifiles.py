"""Hidden tests of the package `inifiles`."""

import pytest

import inifiles


def test_sections():
    assert inifiles.loads("[a]\nx = 1\n[b]\ny=2\n") == {"a": {"x": "1"}, "b": {"y": "2"}}


def test_comments_and_blank_lines():
    assert inifiles.loads("# c\n; d\n\n[a]\nx = 1 # kept\n") == {"a": {"x": "1 # kept"}}


def test_keys_without_section():
    assert inifiles.loads("x = 1\n") == {"": {"x": "1"}}


def test_colons():
    assert inifiles.loads("[a]\nx: 1\n") == {"a": {"x": "1"}}


def test_errors_have_the_line():
    with pytest.raises(inifiles.IniError) as caught:
        inifiles.loads("[a]\nx = 1\nnonsense\n")
    assert caught.value.line == 3


def test_dumps():
    assert inifiles.dumps({"a": {"x": "1"}, "": {"top": "2"}}) == "top = 2\n\n[a]\nx = 1\n"


def test_round_trip():
    data = {"": {"k": "v"}, "one": {"a": "b = c"}, "empty": {}}
    assert inifiles.loads(inifiles.dumps(data)) == data
