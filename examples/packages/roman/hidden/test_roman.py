"""Hidden tests of the package `roman`."""

import pytest

import roman


@pytest.mark.parametrize(
    ("number", "text"), [(1, "I"), (4, "IV"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")]
)
def test_to_roman(number, text):
    assert roman.to_roman(number) == text


@pytest.mark.parametrize("number", [0, 4000, -1])
def test_out_of_range(number):
    with pytest.raises(ValueError):
        roman.to_roman(number)


def test_round_trip():
    assert all(roman.from_roman(roman.to_roman(n)) == n for n in range(1, 4000))


def test_lower_case():
    assert roman.from_roman("xiv") == 14


@pytest.mark.parametrize("text", ["IIII", "VX", "", "ABC"])
def test_wrong_numerals(text):
    with pytest.raises(ValueError):
        roman.from_roman(text)


def test_add():
    assert roman.add("XIX", "XXIII") == "XLII"
