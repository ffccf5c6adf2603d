"""Hidden tests of the package `emitter`."""

import pytest

import emitter


def test_emit_in_order():
    seen, events = [], emitter.Emitter()
    events.on("x", lambda v: seen.append(("a", v)))
    events.on("x", lambda v: seen.append(("b", v)))
    assert events.emit("x", 1) == 2 and seen == [("a", 1), ("b", 1)]


def test_nobody_listens():
    assert emitter.Emitter().emit("x") == 0


def test_off():
    seen, events = [], emitter.Emitter()
    events.on("x", seen.append)
    events.off("x", seen.append)
    assert events.emit("x", 1) == 0


def test_off_of_a_stranger():
    emitter.Emitter().off("x", print)


def test_remove_function():
    seen, events = [], emitter.Emitter()
    remove = events.on("x", seen.append)
    remove()
    remove()
    assert events.emit("x", 1) == 0


def test_once():
    seen, events = [], emitter.Emitter()
    events.once("x", seen.append)
    events.emit("x", 1)
    events.emit("x", 2)
    assert seen == [1]


def test_errors_do_not_stop_others():
    seen, events = [], emitter.Emitter()
    events.on("x", lambda: 1 / 0)
    events.on("x", lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        events.emit("x")
    assert seen == [1]
