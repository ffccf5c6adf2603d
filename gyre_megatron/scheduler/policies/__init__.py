"""Policies: how many cells should train now. Ours by name, or somebody's own `module:function`.

A policy is a pure function `(state, config) -> int`. It is asked only while no cell is between
roles. Cells join training in their fixed order and return in the reverse order, so a number says it
all; `decide` turns it into one role change at a time and owns everything else: dispatch, admission,
steps, weights.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.scheduler.policies.asynchronous import fixed_split
from gyre_megatron.scheduler.policies.colocate import all_cells_together
from gyre_megatron.scheduler.policies.gyre import waterlevel
from gyre_megatron.scheduler.state import SchedulerState

Policy = Callable[[SchedulerState, SchedulerConfig], int]

POLICIES: ExtensionPoint[Policy] = ExtensionPoint(
    key="scheduler.policy",
    parameters=("state", "config"),
    builtin={"gyre": waterlevel, "colocate": all_cells_together, "async": fixed_split},
    returns="int, the number of cells that should train now",
)
