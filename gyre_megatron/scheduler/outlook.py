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
        remaining_s: expected time until every execution that runs now has finished, with the
            cells that serve now.
        call_share: share of an execution's time that it waits for engines, 0 to 1; the rest
            (tools) does not depend on how many cells serve.
        slowdown: b of (1 + b * load) / (1 + b): how much slower a call is on a full cell than on
            an empty one, relative to the latter.
    """

    micro_step_s: float
    micro_steps_per_group: float
    leave_s: float
    return_s: float
    execution_s: float
    remaining_s: float
    call_share: float = 0.5
    slowdown: float = 1.0

    def stretch(self, load: float, other_load: float) -> float:
        """How much longer executions take at `other_load` than at `load` (shares of capacity)."""
        calls = (1.0 + self.slowdown * other_load) / (1.0 + self.slowdown * load)
        return 1.0 + self.call_share * (calls - 1.0)
