"""What is expected of executions that run, from those that have ended."""

from __future__ import annotations

import pytest

from gyre_megatron.scheduler.durations import Durations, LoadHistory


def ended(*seconds: float) -> Durations:
    durations = Durations()
    for value in seconds:
        durations.add(value, load=0.5)
    return durations


def test_nothing_is_expected_before_anything_has_ended():
    assert Durations().mean([3.0]) == Durations().remaining([3.0]) == Durations().mean_load == 0.0


def test_with_many_ended_the_rest_is_that_of_those_that_took_longer():
    durations = ended(*range(1, 101))
    assert durations.mean([]) == durations.mean([10.0]) == pytest.approx(50.5)
    assert durations.remaining([50.0]) == pytest.approx(76 - 50)  # the middle of 51..100
    assert durations.remaining([50.0] * 9) == pytest.approx(96 - 50)
    assert durations.mean_load == pytest.approx(0.5)


def test_those_that_end_first_were_the_short_ones():
    """One of four has ended; the others are no shorter, and the last of them takes longer still."""
    durations = ended(100.0)
    running = [100.0] * 3
    assert durations.mean(running) > 110
    assert durations.remaining(running) > 50
    assert durations.remaining(running[:1], running) < durations.remaining(running)


def test_old_executions_are_forgotten():
    durations = Durations(kept=2)
    for seconds, load in ((100.0, 1.0), (1.0, 0.0), (3.0, 0.5)):
        durations.add(seconds, load)
    assert len(durations) == 2 and durations.mean([]) == 2.0 and durations.mean_load == 0.25


def test_load_is_integrated_over_time():
    loads = LoadHistory()
    loads.update(10.0, running=4, capacity=8)
    loads.update(20.0, running=20, capacity=8)  # beyond its capacity a cell is full
    assert loads.integral(20.0) == pytest.approx(5.0)
    assert loads.integral(22.0) == pytest.approx(7.0)
    loads.update(22.0, running=3, capacity=0)
    assert loads.integral(23.0) == pytest.approx(8.0)
