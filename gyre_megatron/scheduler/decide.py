"""Every decision of a run: `decide(state, config) -> orders`, a pure function.

The control plane asks after every change, carries out what it is told and decides nothing itself.
All orders of one answer are begun before anything else can happen. Long ones (`SerialOrder`,
`Admit`) then go on while further decisions are made; the state says so (`busy`, `admitting`).

Invariants (tested over every reachable state of small systems, with outside events between any two
decisions):
- one serial order at a time: no role, weight or step changes while another one does;
- the training cells are always a prefix 0..k-1 of the cells;
- a cell that trains holds the weights of the step in progress before it claims a micro-step, and
  no order zeroes a gradient that the step still needs;
- weights are published at the end of a burst only, and groups are dispatched at publications only;
- a step's groups are admitted only once it is settled who trains;
- no group is trained later than `scheduler.max_staleness_steps` allows.
"""

from __future__ import annotations

from functools import lru_cache

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError, StalledError
from gyre_megatron.scheduler.orders import (
    Admit,
    Checkpoint,
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Order,
    Publish,
    Return,
    Start,
    Sync,
)
from gyre_megatron.scheduler.policies import POLICIES, Policy
from gyre_megatron.scheduler.state import CellRole, SchedulerState


def decide(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """What to do now.

    Args:
        state: snapshot of the system.
        config: batch, burst and policy settings.

    Returns:
        Orders to begin in sequence; empty when there is nothing to do until something changes.

    Raises:
        PolicyError: the state is impossible, or the policy's answer is.
        ConfigError: `scheduler.policy` names no policy.
    """
    _check_prefix(state)
    _check_counters(state, config)
    orders = () if state.in_transition else _serial(state, config)
    orders = orders or (*_admit(state, config), *_start(state, config))
    if not orders:
        _check_progress(state, config)
    return orders


# One at a time ------------------------------


def _serial(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """The next order that must not overlap with another one of its kind."""
    if _checkpoint_due(state):
        return (Checkpoint(state.trained_steps),)
    if state.published_steps == state.total_steps:
        return (Finish(),)  # nobody serves any more, so no weights are installed again
    if state.trained_steps == state.burst_end(config):
        return (Publish(state.trained_steps, install_in=state.serving_cells),)
    # A step that is complete is finished even while a cell that has just joined holds old weights:
    # its gradients are zero, and what it needs next comes with the step's own publication or sync.
    if state.step_complete(config):
        return (_finish_step(state),)
    if state.stale_cells:
        return (Sync(state.stale_cells, state.trained_steps),)
    return _change_roles(state, config)


def _checkpoint_due(state: SchedulerState) -> bool:
    """Checkpoints fall on publications: there is no batch, and every cell holds the core's weights,
    so that a resumed run starts in a state that this one was in."""
    if state.trained_steps != state.published_steps or state.batch_in_progress:
        return False
    since = state.trained_steps - state.checkpointed_steps
    at_end = state.trained_steps == state.total_steps and since > 0
    return at_end or 0 < state.checkpoint_interval <= since


def _finish_step(state: SchedulerState) -> FinishStep:
    if not state.training_cells:
        raise PolicyError(
            "a step was filled while no cell trains; groups are admitted by the core cell only"
        )
    return FinishStep(
        step=state.trained_steps + 1,
        prefix=len(state.training_cells),
        skip=not state.batch_has_bins,
    )


def _change_roles(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """One step towards the training prefix that the policy wants, and the dispatch between.

    Cells return before new executions are dispatched and leave after it, so that a policy is asked
    about what is about to be dispatched first, and then about what has been.
    """
    num_training = len(state.training_cells)
    wanted = _wanted(state, config)
    # A cell that returned in the middle of a batch would lose its gradients, and in the middle of a
    # burst it would serve weights that were never published.
    if wanted < num_training and state.at_boundary:
        return (Return(state.training_cells[wanted:], state.published_steps),)
    if _nobody_serves_what_the_burst_needs(state, config):
        return (Return(state.training_cells, state.trained_steps),)
    if (num_groups := _groups_to_dispatch(state, config)) > 0:
        return (Dispatch(num_groups),)
    if wanted > num_training and state.has_training_work(config):
        return _leave(state, config, wanted)
    return ()


def _leave(state: SchedulerState, config: SchedulerConfig, wanted: int) -> tuple[Order, ...]:
    """Cells leave together where the policy wants several at once.

    With nobody left to serve, executions that are unfinished wait; that is allowed only if the
    burst in progress does not need them, or nothing would ever happen again.
    """
    if state.waterlevel > 0 and state.capacity_beyond(wanted, config) == 0:
        lacking = state.groups_to_train(config) - state.trainable_groups(config)
        if lacking > 0 and wanted < len(state.roles):
            return ()  # the engines that would serve are dead
        if lacking > 0:
            raise PolicyError(
                f"scheduler.policy {config.policy!r} wants every cell to train while "
                f"{state.waterlevel} executions are unfinished and the burst in progress needs "
                f"{lacking} more groups; no cell would serve them"
            )
    return (Leave(tuple(range(len(state.training_cells), wanted))),)


def _nobody_serves_what_the_burst_needs(state: SchedulerState, config: SchedulerConfig) -> bool:
    """Whether engines were lost until the burst cannot go on unless cells return in its middle.

    What they then serve are weights that were never published; tokens carry their version. A batch
    in progress is finished first if it can be, else it is given up: its groups are ready again.
    """
    lost = (
        state.training_cells
        and state.waterlevel > 0
        and state.serving_capacity(config) == 0
        and state.capacity_beyond(0, config) > 0
    )
    if not lost or state.trainable_groups(config) >= state.groups_to_train(config):
        return False
    if not state.batch_in_progress:
        return True
    idle = state.open_micro_steps == 0 and not state.admitting
    return idle and state.admissible_groups(config) == 0


def _groups_to_dispatch(state: SchedulerState, config: SchedulerConfig) -> int:
    if state.trained_steps > state.published_steps:
        return 0
    return state.groups_to_dispatch(config)


def _wanted(state: SchedulerState, config: SchedulerConfig) -> int:
    wanted = _policy(config.policy)(state, config)
    num_cells = len(state.roles)
    if type(wanted) is not int or not 0 <= wanted <= num_cells:
        raise PolicyError(
            f"scheduler.policy {config.policy!r} returned {wanted!r}; expected the number of cells "
            f"that should train, an int between 0 and {num_cells}"
        )
    return wanted


@lru_cache(maxsize=16)  # a file or module is loaded once, not at every decision
def _policy(name: str) -> Policy:
    return POLICIES.load(name)


# At any time ------------------------------


def _admit(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """The core trains what has finished while the rest still runs.

    Not between a burst's last step and the dispatch that follows it: only then is it settled
    whether the core stays, and a core that left would take the gradients of the new batch along.
    """
    settled = (
        state.trained_steps < state.burst_end(config)
        and state.groups_burst_lacks(config) == 0
        and not (state.at_boundary and state.in_transition)
    )
    if state.roles[0] is not CellRole.TRAIN or state.admitting or not settled:
        return ()
    num_groups = state.admissible_groups(config)
    return (Admit(num_groups),) if num_groups > 0 else ()


def _start(state: SchedulerState, config: SchedulerConfig) -> tuple[Order, ...]:
    """Keep as many executions running as the cells that serve have room for."""
    limit = state.serving_capacity(config)
    if state.max_running is not None:
        limit = min(limit, state.max_running)
    num_executions = min(limit - state.num_running, state.num_waiting)
    return (Start(num_executions),) if num_executions > 0 else ()


# Impossible states ------------------------------


def _check_prefix(state: SchedulerState) -> None:
    training = [role is not CellRole.ROLLOUT for role in state.roles]
    if training != sorted(training, reverse=True):
        raise PolicyError(
            "training cells must be a prefix of the cells, found roles "
            f"{list(map(str, state.roles))}"
        )


def _check_counters(state: SchedulerState, config: SchedulerConfig) -> None:
    if state.dispatched % config.executions_per_group:
        raise PolicyError(
            f"{state.dispatched} executions were dispatched, which is no multiple of "
            f"scheduler.executions_per_group={config.executions_per_group}; the run was started "
            "with another value, go on with that one"
        )


def _check_progress(state: SchedulerState, config: SchedulerConfig) -> None:
    """No order and nothing under way that could change the state: the policy has stalled the
    run."""
    under_way = state.in_transition or state.admitting or state.open_micro_steps > 0
    if not under_way and state.waterlevel == 0:
        raise StalledError(
            f"scheduler.policy {config.policy!r} keeps {len(state.training_cells)} of "
            f"{len(state.roles)} cells in training although every execution has finished, "
            f"{state.ready_groups} groups are ready and {state.admitted_groups} of "
            f"{config.groups_per_step} are admitted; nothing can happen any more"
        )
