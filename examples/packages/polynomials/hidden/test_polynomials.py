"""Hidden tests of the package `polynomials`."""

import pytest

import polynomials


def test_add():
    assert polynomials.add([1, 2], [3, 0, 5]) == [4, 2, 5]


def test_add_cancels():
    assert polynomials.add([1, 2], [0, -2]) == [1]


def test_multiply():
    assert polynomials.multiply([1, 1], [-1, 1]) == [-1, 0, 1]


def test_value():
    assert polynomials.value([1, 0, 3], 2) == 13


def test_derivative():
    assert polynomials.derivative([7, 1, 3]) == [1, 6] and polynomials.derivative([7]) == []


def test_divide():
    assert polynomials.divide([-1, 0, 1], [1, 1]) == ([-1, 1], [])
    assert polynomials.divide([1, 0, 1], [1, 1]) == ([-1, 1], [2])
    with pytest.raises(ZeroDivisionError):
        polynomials.divide([1], [])


def test_text():
    assert polynomials.text([1, -1, 3]) == "3x^2 - x + 1"
    assert polynomials.text([]) == "0" and polynomials.text([0, -1]) == "-x"
