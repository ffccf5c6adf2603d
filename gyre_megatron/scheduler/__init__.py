"""The waterlevel scheduler: pure decisions on plain values.

`decide` is what the control plane asks; `orders` is the vocabulary that it, the control plane and
the cells share; `policies` holds what can be exchanged.
"""

from gyre_megatron.scheduler.decide import decide
from gyre_megatron.scheduler.orders import CellOrder, Order
from gyre_megatron.scheduler.outlook import Outlook
from gyre_megatron.scheduler.policies import POLICIES, Policy
from gyre_megatron.scheduler.state import CellRole, SchedulerState

__all__ = [
    "POLICIES",
    "CellOrder",
    "CellRole",
    "Order",
    "Outlook",
    "Policy",
    "SchedulerState",
    "decide",
]
