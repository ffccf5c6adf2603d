"""The waterlevel scheduler: pure decisions on plain values."""

from gyre_megatron.scheduler.orders import (
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Order,
    Publish,
    Return,
)
from gyre_megatron.scheduler.policy import decide
from gyre_megatron.scheduler.state import Role, SchedulerState

__all__ = [
    "Dispatch",
    "Finish",
    "FinishStep",
    "Leave",
    "Order",
    "Publish",
    "Return",
    "Role",
    "SchedulerState",
    "decide",
]
