"""Hidden tests of the package `ledger`."""

import pytest

import ledger


@pytest.fixture
def book():
    book = ledger.Ledger()
    book.open("a")
    book.open("b", limit=50)
    return book


def test_deposit_and_withdraw(book):
    book.deposit("a", 100)
    book.withdraw("a", 30)
    assert book.balance("a") == 70


def test_overdrawn(book):
    with pytest.raises(ledger.Overdrawn):
        book.withdraw("a", 1)
    assert book.balance("a") == 0


def test_limit(book):
    book.withdraw("b", 50)
    with pytest.raises(ledger.Overdrawn):
        book.withdraw("b", 1)


def test_unknown_account(book):
    with pytest.raises(KeyError):
        book.balance("z")


def test_transfer_is_all_or_nothing(book):
    book.deposit("a", 10)
    book.transfer("a", "b", 10)
    with pytest.raises(ledger.Overdrawn):
        book.transfer("a", "b", 10)
    assert (book.balance("a"), book.balance("b")) == (0, 10)


@pytest.mark.parametrize("amount", [0, -1, 1.5])
def test_amounts(book, amount):
    with pytest.raises(ValueError):
        book.deposit("a", amount)


def test_history_and_undo(book):
    book.deposit("a", 10)
    book.transfer("a", "b", 4)
    assert book.history("a") == [10, -4]
    assert book.undo() and book.history("a") == [10] and book.balance("b") == 0
    assert book.undo() and not book.undo()
