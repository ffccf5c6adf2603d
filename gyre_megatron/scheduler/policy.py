"""The waterlevel policy: `decide(state, config) -> orders`, a pure function.

Invariants (tested over every reachable state of small systems):
- transitions are serial: no order to change a role while a cell is between roles;
- the training cells are always a prefix 0..k-1 of the cells;
- a cell leaves rollout only when the capacity that remains covers the waterlevel, w <= C_R - C_e;
- weights are published at the end of a burst only, and groups are dispatched at publications only.
"""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError
from gyre_megatron.scheduler.orders import (
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Order,
    Publish,
    Return,
)
from gyre_megatron.scheduler.state import Role, SchedulerState


def decide(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """What to do now.

    Args:
        state: snapshot of the system.
        config: batch, burst and policy settings.

    Returns:
        Orders to carry out in sequence; empty when there is nothing to do until something changes.

    Raises:
        PolicyError: the training cells are not a prefix of the cells, or a step was filled without
        the core.
    """
    _check_prefix(state)
    if state.in_transition:
        return ()
    if state.published_steps == state.total_steps:
        return _wind_down(state)
    if state.trained_steps == state.burst_end(config):
        return (Publish(),)
    if state.step_complete(config):
        if not state.training_cells:
            raise PolicyError(
                "a step was filled while no cell trains; groups are admitted by the core cell only"
            )
        return (FinishStep(prefix=len(state.training_cells)),)
    missing = state.dispatch_depth(config) * config.executions_per_group - state.dispatched
    if missing > 0:
        return _dispatch(state, config, missing // config.executions_per_group)
    leaving = _next_to_leave(state, config)
    return () if leaving is None else (Leave(leaving),)


def _check_prefix(state: SchedulerState) -> None:
    training = [role in (Role.TRAIN, Role.LEAVING, Role.RETURNING) for role in state.roles]
    if training != sorted(training, reverse=True):
        raise PolicyError(
            "training cells must be a prefix of the cells, found roles "
            f"{list(map(str, state.roles))}"
        )


def _wind_down(state: SchedulerState) -> tuple[Order, ...]:
    """After the last publication: everybody returns, last joined first, then the run is over."""
    return (Return(state.training_cells[-1]),) if state.training_cells else (Finish(),)


def _dispatch(state: SchedulerState, config: SchedulerConfig, num_groups: int) -> tuple[Order, ...]:
    """At a burst boundary: bring back the cells that the new executions need, then dispatch.

    Cells return last joined first, so the training cells stay a prefix. The core stays in training
    when a group is ready for it and the cells that serve cover what is about to be dispatched.
    """
    unfinished = state.waterlevel + num_groups * config.executions_per_group
    training = state.training_cells
    if training and not _may_stay(state, config, unfinished):
        return (Return(training[-1]),)
    return (Dispatch(num_groups),)


def _may_stay(state: SchedulerState, config: SchedulerConfig, unfinished: int) -> bool:
    if state.training_cells != (0,):
        return False
    if config.policy == "async":
        return True
    covered = unfinished <= len(state.serving_cells) * config.cell_capacity
    return config.policy == "gyre" and state.ready_groups > 0 and covered


def _next_to_leave(state: SchedulerState, config: SchedulerConfig) -> int | None:
    """The next cell of the prefix that should join training now, or None."""
    candidate = len(state.training_cells)
    if candidate == len(state.roles) or not _has_training_work(state, config):
        return None
    if config.policy == "async":
        return candidate if candidate == 0 else None
    if config.policy == "colocate":
        batch_finished = state.admitted_groups + state.ready_groups >= config.groups_per_step
        return candidate if batch_finished and state.waterlevel == 0 else None
    remaining = (len(state.serving_cells) - 1) * config.cell_capacity
    return candidate if state.waterlevel <= remaining else None


def _has_training_work(state: SchedulerState, config: SchedulerConfig) -> bool:
    """Whether the step in progress still has groups to admit or micro-steps to claim."""
    return state.admitted_groups < config.groups_per_step or state.open_micro_steps > 0
