"""Hidden tests of the package `money`."""

import pytest

import money


def euro(amount):
    return money.Money(amount, "EUR")


def test_add_and_subtract():
    assert euro(100) + euro(23) - euro(3) == euro(120)


def test_multiply_from_both_sides():
    assert euro(5) * 3 == euro(15) == 3 * euro(5)


def test_currencies_do_not_mix():
    with pytest.raises(money.CurrencyError):
        euro(1) + money.Money(1, "USD")


def test_order():
    assert euro(1) < euro(2) and euro(3) >= euro(3)


def test_text():
    assert str(euro(1234)) == "12.34 EUR"


def test_negative_text():
    assert str(euro(-5)) == "-0.05 EUR"


def test_parse():
    assert money.parse("-12.05 EUR") == euro(-1205)
    with pytest.raises(ValueError):
        money.parse("12 EUR")


def test_split():
    assert euro(100).split(3) == [euro(34), euro(33), euro(33)]
