"""The scheduler against every state that small systems can reach, and against decisions worked out
by hand."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import msgspec
import pytest

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import ConfigError, PolicyError
from gyre_megatron.scheduler import CellRole, SchedulerState, decide
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
from gyre_megatron.scheduler.outlook import Outlook
from tests.support.scheduler_world import System, drive, explore

R, T = CellRole.ROLLOUT, CellRole.TRAIN
L, B = CellRole.LEAVING, CellRole.RETURNING
POLICIES = ("gyre", "colocate", "async")


def systems(policy: str, sizes, **options) -> list[System]:
    """Systems of every combination of cells, B, N, mu, phi and C."""
    return [
        System(
            num_cells=cells,
            config=SchedulerConfig(
                policy=policy,
                groups_per_step=groups,
                executions_per_group=executions,
                steps_per_burst=burst,
                max_lag_steps=lag,
                cell_capacity=capacity,
            ),
            total_steps=3,
            **options,
        )
        for cells, groups, executions, burst, lag, capacity in product(*sizes)
        if policy != "async" or cells > 1
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_reachable_state_is_safe_and_leads_to_the_end(policy):
    sizes = ((1, 2, 3, 4), (1, 2), (1, 3), (1, 2), (0, 1, 2), (1, 3))
    assert sum(map(explore, systems(policy, sizes))) > 20_000


LONG_TAILS = Outlook(1.0, 4.0, 0.1, 0.1, execution_s=50.0, remaining_s=400.0)
LONG_TRAINING = Outlook(20.0, 8.0, 1.0, 1.0, execution_s=50.0, remaining_s=5.0)
DEAR_MOVES = Outlook(1.0, 4.0, 500.0, 500.0, execution_s=50.0, remaining_s=40.0)


@pytest.mark.parametrize("outlook", [LONG_TAILS, LONG_TRAINING, DEAR_MOVES])
def test_whatever_was_measured_no_state_is_unsafe(outlook):
    sizes = ((1, 2, 3), (1, 2), (1, 2), (1, 2), (0, 1), (1, 3))
    assert sum(map(explore, systems("gyre", sizes, outlook=outlook))) > 10_000


@pytest.mark.parametrize("policy", POLICIES)
def test_so_is_every_state_after_a_kill_at_any_moment(policy):
    sizes = ((1, 2, 3), (1, 2), (1, 2), (1, 2), (0, 1, 2), (1, 3))
    options = {"crashes": 1, "checkpoint_interval": 1, "max_running": 2}
    assert sum(map(explore, systems(policy, sizes, **options))) > 20_000


@pytest.mark.parametrize("policy", POLICIES)
def test_so_is_every_state_after_engines_were_lost_at_any_moment(policy):
    sizes = ((2, 3), (1, 2), (1, 2), (1, 2), (0, 1), (1,))
    for outlook in (None, LONG_TAILS):
        found = systems(policy, sizes, losses=2, outlook=outlook)
        assert sum(map(explore, found)) > 10_000


@pytest.mark.parametrize("policy", POLICIES)
def test_large_systems_run_to_their_end(policy):
    rng = random.Random(5)
    for seed in range(60):
        config = SchedulerConfig(
            policy=policy,
            groups_per_step=rng.randint(1, 6),
            executions_per_group=rng.randint(1, 8),
            steps_per_burst=rng.randint(1, 3),
            max_lag_steps=rng.randint(0, 3),
            cell_capacity=rng.randint(1, 12),
        )
        system = System(
            num_cells=rng.randint(2, 9),
            config=config,
            total_steps=rng.randint(1, 8),
            max_running=rng.choice((None, 3, 40)),
            checkpoint_interval=rng.randint(0, 3),
            crashes=rng.randint(0, 2),
        )
        assert drive(system, seed)[-1].over


# Decisions worked out by hand ------------------------------

CONFIG = SchedulerConfig(groups_per_step=2, executions_per_group=4, cell_capacity=4)


def state(
    roles,
    dispatched=8,
    finished=0,
    trained=0,
    published=0,
    ready=0,
    admitted=0,
    opened=0,
    total=5,
    **known,
) -> SchedulerState:
    return SchedulerState(
        roles=tuple(roles),
        dispatched=dispatched,
        started=dispatched,
        finished=finished,
        trained_steps=trained,
        published_steps=published,
        total_steps=total,
        ready_groups=ready,
        admitted_groups=admitted,
        open_micro_steps=opened,
        **known,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (state([R, R], dispatched=0), [Dispatch(2)]),
        (state([R, R], finished=3), []),  # 5 unfinished, the other cell holds 4
        (state([R, R], finished=4), []),  # covered, but there is nothing to train
        (state([R, R], finished=4, ready=1), [Leave((0,))]),
        (state([R, R], finished=8, ready=2), [Leave((0, 1))]),  # nobody needs to be served
        (state([L, R], finished=4), []),  # one at a time
        (state([R, R], finished=4, busy=True), []),
        (state([T, R], finished=7, admitted=1), []),  # somebody must serve the last one
        (state([T, R], finished=7), [Return((0,), version=0)]),  # nothing to train: better serve
        (state([T, R], finished=8, ready=1, admitted=1, opened=1), [Leave((1,))]),
        # The work is done: no point in joining.
        (state([T, R], finished=8, admitted=2), [FinishStep(1, prefix=1, skip=False)]),
        (state([T, T], finished=8, admitted=2), [FinishStep(1, prefix=2, skip=False)]),
        (
            state([T, T], finished=8, admitted=2, batch_has_bins=False),
            [FinishStep(1, prefix=2, skip=True)],
        ),
        (state([T, T], finished=8, trained=1), [Publish(1, install_in=())]),
        (state([T, R, R], finished=8, trained=1), [Publish(1, install_in=(1, 2))]),
        (state([T, T], finished=8, trained=1, published=1), [Return((0, 1), version=1)]),
        (state([T, R], finished=8, trained=1, published=1), [Return((0,), version=1)]),
        (state([R, R], finished=8, trained=1, published=1), [Dispatch(2)]),
    ],
)
def test_roles_and_steps(given: SchedulerState, expected: list[Order]):
    assert decide(given, CONFIG) == tuple(expected)


def test_the_end_of_a_run():
    done = {"dispatched": 40, "finished": 40, "trained": 5, "published": 5}
    assert decide(state([T, T], **done), CONFIG) == (Checkpoint(5),)
    done["checkpointed_steps"] = 5
    # Nobody will call any more, so no weights are installed for it.
    assert decide(state([T, T], **done), CONFIG) == (Finish(),)
    assert decide(state([R, R], **done), CONFIG) == (Finish(),)


@pytest.mark.parametrize(
    ("step", "interval", "latest", "due"),
    [
        (1, 1, 0, True),
        (1, 2, 0, False),
        (3, 2, 0, True),
        (3, 2, 2, False),
        (4, 0, 0, False),
        (5, 0, 0, True),
        (5, 9, 4, True),
        (5, 1, 5, False),
    ],
)
def test_when_a_checkpoint_is_due(step, interval, latest, due):
    given = state(
        [T, R],
        dispatched=8 * step,
        finished=8 * step,
        trained=step,
        published=step,
        checkpoint_interval=interval,
        checkpointed_steps=latest,
    )
    assert (decide(given, CONFIG) == (Checkpoint(step),)) is due


@pytest.mark.parametrize(
    ("waiting", "roles", "running", "max_running", "expected"),
    [
        (8, [R, R], 0, None, [Start(8)]),
        (8, [R, R], 0, 3, [Start(3)]),
        (8, [R, R], 0, 0, []),
        (5, [R, R], 3, None, [Start(5)]),
        (2, [R, R], 6, None, [Start(2)]),
        (4, [L, R], 4, None, []),  # what a leaving cell held goes to the others first
        (6, [L, R], 2, None, [Start(2)]),
        (5, [T, R], 3, None, [Start(1)]),
        (0, [R, R], 8, None, []),
        (0, [R, R], 9, None, []),  # a harness whose execution has finished a moment ago
    ],
)
def test_how_many_executions_start(waiting, roles, running, max_running, expected):
    given = state(roles, running=running, max_running=max_running, dispatched=8, admitted=1)
    assert given.num_waiting == waiting
    assert decide(given, CONFIG) == tuple(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (state([T, R], finished=7, ready=1), [Admit(1)]),
        (state([T, R], finished=7, ready=1, admitting=True), []),
        (state([T, R], finished=7, ready=1, admitted=1, busy=True), [Admit(1)]),
        # A checkpoint is being written: cells may return after it, and would take gradients along.
        (state([T, R], finished=7, ready=1, busy=True), []),
        (state([L, R], finished=8, ready=2), []),
        (state([R, R], finished=3, ready=0), []),
        (state([T, L], finished=8, ready=2, admitted=0), []),
        (state([T, L], finished=8, ready=2, admitted=1, opened=1), [Admit(1)]),
        # Published, and the next groups are still to be dispatched: the core might return.
        (state([T, B], finished=8, trained=1, published=1, ready=1, dispatched=8), []),
        # The burst is over and being published.
        (state([T, R], dispatched=16, finished=16, trained=1, ready=2, busy=True), []),
    ],
)
def test_which_groups_are_admitted_when(given, expected):
    assert decide(given, CONFIG) == tuple(expected)


def test_only_cells_with_old_weights_sync_in_the_middle_of_a_burst():
    burst = CONFIG.model_copy(update={"steps_per_burst": 2})
    joined = state(
        [T, T, R],
        dispatched=16,
        finished=12,
        trained=1,
        admitted=1,
        ready=1,
        opened=2,
        cell_versions=(1, 0, 0),
    )
    assert decide(joined, burst) == (Sync((1,), version=1),)
    others_train = state(
        [T, T, T],
        dispatched=16,
        finished=16,
        trained=1,
        admitted=2,
        opened=2,
        cell_versions=(1, 1, 0),
    )
    assert decide(others_train, burst) == (Sync((2,), version=1),)
    step_done = state([T, T], dispatched=16, finished=16, trained=1, cell_versions=(1, 0))
    assert decide(step_done, burst) == (Sync((1,), version=1),)
    nothing_left = state(
        [T, T], dispatched=16, finished=16, trained=1, admitted=2, cell_versions=(1, 0)
    )
    assert decide(nothing_left, burst) == (FinishStep(2, prefix=2, skip=False),)


def test_core_stays_in_training_when_the_rest_covers_the_next_dispatch():
    lag = CONFIG.model_copy(update={"max_lag_steps": 1})
    # 16 dispatched at start; step 1 is published with one group of the next batch ready.
    given = state([T, R, R, R], dispatched=16, finished=14, trained=1, published=1, ready=1)
    assert decide(given, lag) == (Dispatch(2),)
    crowded = state([T, R], dispatched=16, finished=14, trained=1, published=1, ready=1)
    assert decide(crowded, lag) == (Return((0,), version=1),)
    nothing_ready = state([T, R, R, R], dispatched=16, finished=14, trained=1, published=1, ready=0)
    assert decide(nothing_ready, lag) == (Return((0,), version=1),)


def test_a_group_that_was_admitted_is_as_ready_as_one_that_was_not():
    """A core that returned here would take the gradients of an open micro-step along, and leave a
    full batch with nobody to train it."""
    lag = CONFIG.model_copy(update={"max_lag_steps": 1})
    given = SchedulerState((T, R, R, R), 16, 16, 16, 1, 1, 9, 0, 2, 1)
    assert decide(given, lag) == (Dispatch(2),)
    no_room = SchedulerState((T, R), 16, 16, 16, 1, 1, 9, 0, 2, 1)
    assert decide(no_room, lag) == (Dispatch(2),), "a batch in progress is trained first"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: state([R, T]), "must be a prefix"),
        (lambda: state([R], dispatched=1, finished=2), "dispatched >= started"),
        (lambda: state([R], trained=1, published=2), "total >= trained"),
        (lambda: state([]), "at least one cell"),
        (lambda: state([R, R], cell_versions=(0,)), "one weight version for each of its 2 cells"),
        (lambda: state([R, R], finished=8, admitted=2), "while no cell trains"),
        (lambda: state([R, R], dispatched=6), "no multiple of scheduler.executions_per_group=4"),
    ],
)
def test_impossible_states_are_refused(build, message):
    with pytest.raises(PolicyError, match=message):
        decide(build(), CONFIG)


# Policies of one's own ------------------------------


def two_at_most(state: SchedulerState, config: SchedulerConfig) -> int:
    """Two cells train once everything has finished."""
    if state.groups_to_dispatch(config) > 0:
        return 0
    return 2 if state.waterlevel == 0 else len(state.training_cells)


def test_a_policy_of_ones_own_is_called_by_its_name(tmp_path: Path):
    config = CONFIG.model_copy(update={"policy": f"{__name__}:two_at_most"})
    assert decide(state([R, R, R], finished=8, ready=2), config) == (Leave((0, 1)),)
    assert decide(state([T, R, R], finished=8, ready=2), config) == (Leave((1,)),)
    assert decide(state([T, T, R], finished=8, ready=2), config) == (Admit(2),)
    assert explore(System(3, config, total_steps=3)) > 100

    file = tmp_path / "mine.py"
    file.write_text("def never(state, config):\n    return 0\n")
    stubborn = CONFIG.model_copy(update={"policy": f"{file}:never"})
    assert decide(state([R, R]), stubborn) == ()
    with pytest.raises(PolicyError, match=r"mine.py:never' keeps 0 of 2 cells in training"):
        decide(state([R, R], finished=8, ready=2), stubborn)


def one_argument(state):
    return 0


def returns(value):
    return lambda state, config: value


wants_a_third = returns(3)
wants_half = returns(0.5)
wants_all = returns(2)


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        ("gyr", ConfigError, "unknown name 'gyr'; did you mean gyre"),
        (f"{__name__}:missing", ConfigError, "has no 'missing'"),
        (f"{__name__}:one_argument", ConfigError, r"cannot be called as \(state, config\) -> int"),
        (f"{__name__}:CONFIG", ConfigError, "a function or class was expected"),
        (f"{__name__}:wants_a_third", PolicyError, "returned 3; expected .* between 0 and 2"),
        (f"{__name__}:wants_half", PolicyError, "returned 0.5; expected"),
    ],
)
def test_policies_that_break_the_contract_are_refused(policy, kind, message):
    config = CONFIG.model_copy(update={"policy": policy})
    with pytest.raises(kind, match=message):
        decide(state([R, R]), config)


def test_a_policy_cannot_leave_executions_without_an_engine():
    config = CONFIG.model_copy(update={"policy": f"{__name__}:wants_all"})
    with pytest.raises(PolicyError, match="no cell would serve them"):
        decide(state([T, R], finished=7), config)
    with pytest.raises(PolicyError, match="no cell would serve them"):
        decide(state([R]), CONFIG.model_copy(update={"policy": "async"}))


# The vocabulary ------------------------------


@pytest.mark.parametrize("order", [Dispatch(2), Sync((1, 2), 3), Publish(4, (1,)), Finish()])
def test_orders_are_values(order):
    assert order == type(order)(**msgspec.structs.asdict(order))
    assert len({order, type(order)(**msgspec.structs.asdict(order))}) == 1
    with pytest.raises(AttributeError):
        order.anything = 1
