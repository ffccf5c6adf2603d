"""Hidden tests of the package `units`."""

import pytest

import units


def test_length():
    assert units.convert(3, "km", "m") == pytest.approx(3000)
    assert units.convert(1, "mi", "ft") == pytest.approx(5280)


def test_unknown_unit():
    with pytest.raises(KeyError):
        units.convert(1, "m", "parsec")


def test_mass():
    assert units.convert(2, "lb", "g") == pytest.approx(907.18474)


def test_temperature():
    assert units.convert(100, "C", "F") == pytest.approx(212)
    assert units.convert(0, "K", "C") == pytest.approx(-273.15)


def test_kinds_do_not_mix():
    with pytest.raises(ValueError):
        units.convert(1, "kg", "m")


def test_parse():
    assert units.parse("3.5 km") == (3.5, "km")


def test_parse_without_space():
    assert units.parse(" -2cm ") == (-2.0, "cm")
    with pytest.raises(ValueError):
        units.parse("cm 2")


def test_best():
    assert units.best(1500, "m") == (pytest.approx(1.5), "km") and units.best(0.2, "mm")[1] == "mm"
