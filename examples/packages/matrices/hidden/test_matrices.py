"""Hidden tests of the package `matrices`."""

import pytest

import matrices


def test_transpose():
    assert matrices.transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]


def test_multiply():
    assert matrices.multiply([[1, 2], [3, 4]], [[0, 1], [1, 0]]) == [[2, 1], [4, 3]]


def test_identity():
    assert matrices.multiply(matrices.identity(2), [[7, 8], [9, 1]]) == [[7, 8], [9, 1]]


def test_determinant():
    assert matrices.determinant([[2, 0, 1], [1, 3, 2], [1, 1, 1]]) == 0
    assert matrices.determinant([[0, 2], [3, 4]]) == -6


def test_shapes_are_checked():
    with pytest.raises(ValueError):
        matrices.multiply([[1, 2]], [[1, 2]])


def test_not_square():
    with pytest.raises(ValueError):
        matrices.determinant([[1, 2]])
