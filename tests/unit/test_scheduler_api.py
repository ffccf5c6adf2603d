"""Public names of the scheduler and the contract of a policy: what others build on."""

from __future__ import annotations

import inspect
from typing import get_args

from gyre_megatron import scheduler
from gyre_megatron.scheduler import POLICIES, CellOrder, Order, decide


def test_names():
    values = ["CellRole", "Outlook", "SchedulerState"]
    expected = sorted(["POLICIES", "CellOrder", "Order", "Policy", "decide", *values])
    assert sorted(scheduler.__all__) == expected
    assert all(hasattr(scheduler, name) for name in expected)


def test_decide_is_a_function_of_state_and_configuration():
    assert list(inspect.signature(decide).parameters) == ["state", "config"]


def test_our_own_policies_keep_the_contract_of_everybodys():
    assert set(POLICIES.builtin) == {"gyre", "colocate", "async"}
    assert POLICIES.parameters == ("state", "config")
    for name, policy in POLICIES.builtin.items():
        assert tuple(inspect.signature(policy).parameters) == POLICIES.parameters, name


def test_one_vocabulary():
    """What cells are sent is what was decided, but for what they ask for themselves."""
    decided = {order.__name__ for order in get_args(Order)}
    sent = {order.__name__ for order in get_args(CellOrder)}
    assert decided == (
        {"Dispatch", "Start", "Admit", "Finish"}
        | {"Leave", "Return", "Sync", "FinishStep", "Publish", "Checkpoint"}
    )
    assert sent - decided == {"MicroStep", "Wait", "Stop"}
