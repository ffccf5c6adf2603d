"""What has been measured of a run so far, for policies that weigh a move's gain against its cost.

The runtime measures these on its own cells, the simulator on its modelled ones. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outlook:
    """Measured costs, and what is left to serve. Seconds are wall-clock.

    Attributes:
        micro_step_s: one micro-step on one cell.
        micro_steps_per_group: mean over recent groups.
        leave_s, return_s: a role change of one cell, from order to report.
        execution_s: mean wall time of recent executions.
        remaining_s: expected time until the executions that run now and that the burst in progress
            needs (the oldest ones) have finished, at the load of `execution_load`.
        call_share: share of an execution's time that it waits for engines, 0 to 1; the rest
            (tools) does not depend on how many cells serve.
        slowdown: b of (1 + b * load) / (1 + b): how much slower a call is on a full cell than on
            an empty one, relative to the latter.
        execution_load: mean share of the capacity in use while those recent executions ran.
    """

    micro_step_s: float
    micro_steps_per_group: float
    leave_s: float
    return_s: float
    execution_s: float
    remaining_s: float
    call_share: float = 0.5
    slowdown: float = 1.0
    execution_load: float = 1.0

    def stretch(self, load: float) -> float:
        """How much longer executions take at `load` (share of capacity) than they have taken."""
        calls = (1.0 + self.slowdown * load) / (1.0 + self.slowdown * self.execution_load)
        return 1.0 + self.call_share * (calls - 1.0)
