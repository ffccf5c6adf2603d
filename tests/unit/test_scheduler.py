"""The scheduler against every state that small systems can reach, and against decisions worked out
by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import product

import pytest

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError
from gyre_megatron.scheduler import (
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Publish,
    Return,
    Role,
    SchedulerState,
    decide,
)

R, T, L, B = Role.ROLLOUT, Role.TRAIN, Role.LEAVING, Role.RETURNING


@dataclass(frozen=True)
class World:
    """A system small enough to explore whole. `unfinished` holds, per running group, its executions
    that still run."""

    roles: tuple[Role, ...]
    unfinished: tuple[int, ...]
    finished_groups: int
    dispatched_groups: int
    finished: int
    trained: int
    published: int
    admitted: int
    open_micro_steps: int
    over: bool = False

    def state(self, config: SchedulerConfig, total: int) -> SchedulerState:
        dispatched = self.dispatched_groups * config.executions_per_group
        return SchedulerState(
            roles=self.roles,
            dispatched=dispatched,
            started=dispatched,
            finished=self.finished,
            trained_steps=self.trained,
            published_steps=self.published,
            total_steps=total,
            ready_groups=self.finished_groups
            - self.trained * config.groups_per_step
            - self.admitted,
            admitted_groups=self.admitted,
            open_micro_steps=self.open_micro_steps,
        )


def apply(world: World, order, config: SchedulerConfig, total: int) -> World:
    """Carry one order out and check what must hold whenever it is given."""
    roles = list(world.roles)
    match order:
        case Dispatch(num_groups):
            assert num_groups > 0
            assert world.trained == world.published, (
                "groups are dispatched at burst boundaries only"
            )
            new = (config.executions_per_group,) * num_groups
            return replace(
                world,
                unfinished=tuple(sorted(world.unfinished + new)),
                dispatched_groups=world.dispatched_groups + num_groups,
            )
        case Leave(cell):
            assert cell == sum(role is T for role in roles), "cells join in order"
            if config.policy == "gyre":
                left = sum(role is R for role in roles) - 1
                waterlevel = world.dispatched_groups * config.executions_per_group - world.finished
                assert waterlevel <= left * config.cell_capacity, (
                    "what remains must cover the unfinished work"
                )
            roles[cell] = L
        case Return(cell):
            assert cell == sum(role is T for role in roles) - 1, "cells return in reverse order"
            roles[cell] = B
        case FinishStep(prefix):
            assert prefix == sum(role is T for role in roles) >= 1
            assert world.admitted == config.groups_per_step and world.open_micro_steps == 0
            return replace(world, trained=world.trained + 1, admitted=0)
        case Publish():
            burst = min(config.steps_per_burst, total - world.published)
            assert world.trained == world.published + burst, (
                "weights are published at the end of a burst only"
            )
            return replace(world, published=world.trained)
        case Finish():
            assert all(role is R for role in roles)
            return replace(world, over=True)
    return replace(world, roles=tuple(roles))


def events(world: World, config: SchedulerConfig, total: int) -> list[World]:
    """Everything that can happen next outside the scheduler."""
    after = []
    moving = [cell for cell, role in enumerate(world.roles) if role in (L, B)]
    assert len(moving) <= 1, "transitions are serial"
    for cell in moving:
        roles = list(world.roles)
        roles[cell] = T if roles[cell] is L else R
        after.append(replace(world, roles=tuple(roles)))
    if any(role is R for role in world.roles):
        for group in set(world.unfinished):
            left = list(world.unfinished)
            left.remove(group)
            left += [group - 1] if group > 1 else []
            done = world.finished_groups + (group == 1)
            finished = world.finished + 1
            after.append(
                replace(
                    world, unfinished=tuple(sorted(left)), finished_groups=done, finished=finished
                )
            )
    state = world.state(config, total)
    if (
        world.roles[0] is T
        and state.ready_groups
        and world.admitted < config.groups_per_step
        and world.trained < total
    ):
        for micro_steps in (0, 1):
            admitted, opened = world.admitted + 1, world.open_micro_steps + micro_steps
            after.append(replace(world, admitted=admitted, open_micro_steps=opened))
    if world.open_micro_steps and T in world.roles:
        after.append(replace(world, open_micro_steps=world.open_micro_steps - 1))
    return after


def explore(num_cells: int, config: SchedulerConfig, total: int) -> int:
    """Visit every reachable state; returns how many. Fails on a broken invariant or a state that
    leads nowhere."""
    start = World((R,) * num_cells, (), 0, 0, 0, 0, 0, 0, 0)
    seen, queue, ended = {start}, deque([start]), False
    while queue:
        world = queue.popleft()
        roles = [role is not R for role in world.roles]
        assert roles == sorted(roles, reverse=True), "training cells are a prefix"
        assert world.dispatched_groups <= (
            world.published + config.max_lag_steps + config.steps_per_burst
        ) * (config.groups_per_step)
        orders = decide(world.state(config, total), config)
        if orders:
            following = world
            for order in orders:
                following = apply(following, order, config, total)
            nexts = [following]
            if following.over:
                ended = True
                continue
        else:
            nexts = events(world, config, total)
            assert nexts, f"nothing can happen any more in {world}"
        for following in nexts:
            if following not in seen:
                seen.add(following)
                queue.append(following)
    assert ended, "the run never ends"
    return len(seen)


@pytest.mark.parametrize("policy", ["gyre", "colocate", "async"])
def test_every_reachable_state_is_safe_and_leads_on(policy):
    visited = 0
    for cells, groups, executions, burst, lag, capacity in product(
        (1, 2, 3, 4), (1, 2), (1, 3), (1, 2), (0, 1, 2), (1, 3)
    ):
        if policy == "async" and cells == 1:
            continue
        config = SchedulerConfig(
            policy=policy,
            groups_per_step=groups,
            executions_per_group=executions,
            steps_per_burst=burst,
            max_lag_steps=lag,
            cell_capacity=capacity,
        )
        visited += explore(cells, config, total=3)
    assert visited > 10_000


CONFIG = SchedulerConfig(groups_per_step=2, executions_per_group=4, cell_capacity=4)


def state(
    roles, dispatched=8, finished=0, trained=0, published=0, ready=0, admitted=0, opened=0, total=5
):
    return SchedulerState(
        tuple(roles),
        dispatched,
        dispatched,
        finished,
        trained,
        published,
        total,
        ready,
        admitted,
        opened,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (state([R, R], dispatched=0), (Dispatch(2),)),
        (state([R, R], finished=3), ()),  # 5 unfinished, the other cell holds 4
        (state([R, R], finished=4), (Leave(0),)),
        (state([L, R], finished=8), ()),  # serial
        (state([T, R], finished=7), ()),  # nobody would be left to serve the last one
        (state([T, R], finished=8, ready=1, admitted=1, opened=1), (Leave(1),)),
        (
            state([T, R], finished=8, admitted=2),
            (FinishStep(1),),
        ),  # the work is done: no point in joining
        (state([T, T], finished=8, admitted=2), (FinishStep(2),)),
        (state([T, T], finished=8, trained=1), (Publish(),)),
        (state([T, T], finished=8, trained=1, published=1), (Return(1),)),
        (state([T, R], finished=8, trained=1, published=1), (Return(0),)),
        (state([R, R], finished=8, trained=1, published=1), (Dispatch(2),)),
        (state([T, T], dispatched=40, finished=40, trained=5, published=5), (Return(1),)),
        (state([R, R], dispatched=40, finished=40, trained=5, published=5), (Finish(),)),
    ],
)
def test_decisions_worked_out_by_hand(given, expected):
    assert decide(given, CONFIG) == expected


def test_core_stays_in_training_when_the_rest_covers_the_next_dispatch():
    lag = CONFIG.model_copy(update={"max_lag_steps": 1})
    # 16 dispatched at start; step 1 is published with one group of the next batch ready.
    given = state([T, R, R, R], dispatched=16, finished=14, trained=1, published=1, ready=1)
    assert decide(given, lag) == (Dispatch(2),)
    crowded = state([T, R], dispatched=16, finished=14, trained=1, published=1, ready=1)
    assert decide(crowded, lag) == (Return(0),)
    nothing_ready = state([T, R, R, R], dispatched=16, finished=14, trained=1, published=1, ready=0)
    assert decide(nothing_ready, lag) == (Return(0),)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: state([R, T]), None),
        (lambda: state([R], dispatched=1, finished=2), "dispatched >= started"),
        (lambda: state([R], trained=1, published=2), "total >= trained"),
        (lambda: state([]), "at least one cell"),
        (lambda: state([R, R], finished=8, admitted=2), None),
    ],
)
def test_impossible_states_are_refused(build, message):
    with pytest.raises(PolicyError, match=message):
        decide(build(), CONFIG)
