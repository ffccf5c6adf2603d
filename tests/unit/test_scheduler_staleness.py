"""No group is trained later than the bound allows, and no bound that can be kept stalls a run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.staleness import num_admissible


@pytest.mark.parametrize(
    ("ready", "unfinished", "step", "free", "bound", "expected"),
    [
        ((), (0,), 3, 2, 1, 0),
        ((3, 3, 3), (), 3, 2, 1, 2),
        ((0, 3), (3,), 3, 2, 3, 2),  # nobody older is unfinished
        ((3, 3), (2,), 3, 2, 1, 1),  # the last step of the unfinished one: a slot is kept for it
        ((3, 3), (2, 2), 3, 2, 1, 0),
        ((2, 3, 3), (2,), 3, 2, 1, 1),  # its equal goes first and takes no slot away from it
        ((3, 3), (2, 2), 3, 2, 2, 2),  # they may still be trained by the next step
        ((3, 3), (2, 2, 2), 3, 2, 2, 1),  # only two of the three
        ((3, 3), (1,), 3, 2, 1, 1),  # overdue already: it goes first, nothing more is lost
    ],
)
def test_slots_are_kept_for_whom_a_step_is_the_last(ready, unfinished, step, free, bound, expected):
    assert num_admissible(ready, unfinished, step, free, 2, bound) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2), st.data())
def test_every_group_is_trained_in_time_whatever_finishes_when(size, burst, lag, slack, data):
    """A whole run: dispatch to the depth at each boundary, any order of finishes, each step takes
    what it may; a step that takes nothing waits for one more group."""
    bound = lag + burst - 1 + slack
    ready: list[int] = []
    unfinished: list[int] = []
    total, dispatched = 6 * burst, 0
    for step in range(total):
        if step % burst == 0:
            depth = min(step + lag + burst, total) * size
            unfinished += [step] * (depth - dispatched)
            dispatched = depth
        free = size
        while free:
            taken = num_admissible(ready, unfinished, step, free, size, bound)
            for version in ready[:taken]:
                assert step - version <= bound
            del ready[:taken]
            free -= taken
            if free and not taken:
                place = data.draw(st.integers(0, len(unfinished) - 1))
                ready = sorted([*ready, unfinished.pop(place)])


def test_the_bound_and_its_default():
    config = SchedulerConfig(max_lag_steps=2, steps_per_burst=3)
    assert config.staleness_bound == 6
    assert SchedulerConfig(max_staleness_steps=5).staleness_bound == 5
    with pytest.raises(ValidationError, match="max_staleness_steps=3 cannot be kept"):
        SchedulerConfig(max_lag_steps=2, steps_per_burst=3, max_staleness_steps=3)
