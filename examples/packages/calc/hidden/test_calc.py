"""Hidden tests of the package `calc`."""

import pytest

import calc


def test_sums():
    assert calc.evaluate("1 + 2 - 4") == -1


def test_precedence():
    assert calc.evaluate("2 + 3 * 4") == 14


def test_parentheses():
    assert calc.evaluate("(2 + 3) * -4") == -20


def test_powers():
    assert calc.evaluate("-2^2") == -4 and calc.evaluate("2^3^2") == 512


def test_variables():
    assert calc.evaluate("a * (b + 1)", {"a": 3, "b": 4}) == 15


def test_variables_of():
    assert calc.variables_of("x + y * x - 2") == {"x", "y"}


@pytest.mark.parametrize("text", ["1 +", "(1", "2 2", "a", "1 $ 2", ""])
def test_errors(text):
    with pytest.raises(calc.CalcError):
        calc.evaluate(text)


def test_division():
    assert calc.evaluate("7 / 2") == 3.5
    with pytest.raises(ZeroDivisionError):
        calc.evaluate("1 / 0")
