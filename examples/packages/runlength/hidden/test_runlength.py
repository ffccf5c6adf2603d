"""Hidden tests of the package `runlength`."""

import pytest

import runlength


def test_encode():
    assert runlength.encode("aaab") == "3a1b"


def test_empty():
    assert runlength.encode("") == "" and runlength.decode("") == ""


def test_digits_are_escaped():
    assert runlength.encode("11") == "2\\1"


@pytest.mark.parametrize("text", ["", "a", "aaabbc", "112\\\\x", "\n\n\t", "a" * 123])
def test_round_trip(text):
    assert runlength.decode(runlength.encode(text)) == text


@pytest.mark.parametrize("code", ["3", "0a", "a", "1a2a", "2"])
def test_wrong_code(code):
    with pytest.raises(ValueError):
        runlength.decode(code)


def test_ratio():
    assert runlength.ratio("aaaa") == 0.5


def test_ratio_of_nothing():
    assert runlength.ratio("") == 1.0
