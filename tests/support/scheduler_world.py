"""A system around the real `decide`, small enough to explore whole: every order is carried out, and
everything that can happen outside happens between any two decisions.

A serial order and an admission have a beginning (the decision) and an end (an event), as in the
control plane. What must always hold is asserted where an order is begun or ended.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gyre_megatron.config.scheduler import SchedulerConfig
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
    SerialOrder,
    Start,
    Sync,
)
from gyre_megatron.scheduler.outlook import Outlook

R, T, L, B = CellRole.ROLLOUT, CellRole.TRAIN, CellRole.LEAVING, CellRole.RETURNING


@dataclass(frozen=True)
class System:
    """What does not change during a run.

    Attributes:
        outlook: what is claimed to have been measured, whenever an execution has finished; right or
            wrong, it must not break anything.
        crashes: how often the control plane may be killed and resume from its checkpoint.
        losses: how many cells may lose their engines for good, the trainer staying.
    """

    num_cells: int
    config: SchedulerConfig
    total_steps: int
    max_running: int | None = None
    checkpoint_interval: int = 0
    crashes: int = 0
    losses: int = 0
    outlook: Outlook | None = None


class World(NamedTuple):
    """A state of the system.

    Attributes:
        unfinished: per group that has not finished, in dispatch order, the version that it was
            dispatched under and its unfinished executions.
        waiting: how many of those have not been started; always the last ones.
        ready: dispatch versions of the groups that are finished and not admitted, ascending.
        in_batch: the same of the groups admitted, or being admitted, to the step in progress.
        since: the same of those trained since the latest checkpoint: a kill brings them back.
        dead: cells without engines.
        versions: weight version of each cell's trainer.
        gradients: whether each cell holds gradients that the step in progress needs.
        serial: the serial order that is being carried out.
        admitting: groups that the admission under way has still to add.
    """

    roles: tuple[CellRole, ...]
    versions: tuple[int, ...]
    gradients: tuple[bool, ...]
    unfinished: tuple[tuple[int, int], ...] = ()
    waiting: int = 0
    ready: tuple[int, ...] = ()
    in_batch: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    trained: int = 0
    published: int = 0
    checkpointed: int = 0
    admitted: int = 0
    open_micro_steps: int = 0
    has_bins: bool = False
    serial: SerialOrder | None = None
    admitting: int = 0
    crashes: int = 0
    over: bool = False

    @property
    def num_unfinished(self) -> int:
        return sum(count for _, count in self.unfinished)


def start_of(system: System) -> World:
    """Every cell serves, nothing has been dispatched."""
    n = system.num_cells
    return World(roles=(R,) * n, versions=(0,) * n, gradients=(False,) * n)


def state_of(world: World, system: System) -> SchedulerState:
    """What the control plane would tell the scheduler."""
    config = system.config
    dispatched = _num_dispatched(world, config) * config.executions_per_group
    num_unfinished = world.num_unfinished
    # Groups whose admission has begun count as ready until they are admitted.
    ready = tuple(sorted(world.ready + world.in_batch[world.admitted :]))
    return SchedulerState(
        roles=world.roles,
        dispatched=dispatched,
        started=dispatched - world.waiting,
        finished=dispatched - num_unfinished,
        trained_steps=world.trained,
        published_steps=world.published,
        total_steps=system.total_steps,
        ready_groups=len(ready),
        ready_versions=ready,
        unfinished_versions=tuple(sorted(version for version, _ in world.unfinished)),
        capacities=tuple(
            0 if cell in world.dead else config.cell_capacity for cell in range(len(world.roles))
        ),
        admitted_groups=world.admitted,
        open_micro_steps=world.open_micro_steps,
        batch_has_bins=world.has_bins,
        running=num_unfinished - world.waiting,
        max_running=system.max_running,
        cell_versions=world.versions,
        checkpointed_steps=world.checkpointed,
        checkpoint_interval=system.checkpoint_interval,
        admitting=world.admitting > 0,
        busy=world.serial is not None,
        outlook=system.outlook if dispatched > num_unfinished else None,
    )


def _num_dispatched(world: World, config: SchedulerConfig) -> int:
    trained = world.trained * config.groups_per_step
    return len(world.unfinished) + len(world.ready) + len(world.in_batch) + trained


def room_of(world: World, config: SchedulerConfig) -> int:
    """Executions that the cells which serve have room for."""
    cells = enumerate(world.roles)
    serving = sum(role is R and cell not in world.dead for cell, role in cells)
    return serving * config.cell_capacity


# Orders begin ------------------------------


def begin(world: World, order: Order, system: System) -> World:
    """Begin an order; what must hold whenever it is given is asserted."""
    config = system.config
    num_training = sum(role is T for role in world.roles)
    match order:
        case Dispatch(num_groups):
            assert num_groups > 0
            assert world.trained == world.published, "groups are dispatched at publications only"
            assert world.serial is None
            new = ((world.published, config.executions_per_group),) * num_groups
            waiting = world.waiting + num_groups * config.executions_per_group
            return world._replace(unfinished=world.unfinished + new, waiting=waiting)
        case Start(num_executions):
            running = world.num_unfinished - world.waiting
            room = room_of(world, config)
            assert 0 < num_executions <= world.waiting
            assert running + num_executions <= room, "what serves must have room"
            assert running + num_executions <= (system.max_running or room)
            return world._replace(waiting=world.waiting - num_executions)
        case Admit(num_groups):
            assert world.admitting == 0 < num_groups
            assert world.admitted + num_groups <= config.groups_per_step
            assert world.roles[0] is T
            taken = world.ready[:num_groups]
            oldest = world.trained - config.staleness_bound
            assert len(taken) == num_groups and min(taken) >= oldest, "trained too late"
            in_batch = world.in_batch + taken
            return world._replace(
                admitting=num_groups, ready=world.ready[num_groups:], in_batch=in_batch
            )
        case Finish():
            assert world.serial is None and not world.unfinished
            assert world.published == system.total_steps == world.checkpointed
            return world._replace(over=True)
    assert world.serial is None, "one serial order at a time"
    roles = list(world.roles)
    match order:
        case Leave(cells):
            assert cells == tuple(range(num_training, num_training + len(cells))), "in order"
            if config.policy == "gyre":
                _check_waterlevel(world, num_training + len(cells), system)
            for cell in cells:
                roles[cell] = L
        case Return(cells, version):
            assert cells == tuple(range(num_training - len(cells), num_training)), "in order"
            assert not world.admitting and not world.open_micro_steps
            if world.admitted or world.trained != world.published:
                assert room_of(world, config) == 0, "in mid-burst only if nobody serves"
                assert len(cells) == num_training
                world = world._replace(
                    ready=tuple(sorted(world.ready + world.in_batch)),
                    in_batch=(),
                    admitted=0,
                    has_bins=False,
                    gradients=(False,) * len(roles),
                )
            for cell in cells:
                assert version == world.trained == world.versions[cell], "what the core holds"
                roles[cell] = B
        case Sync(cells, version):
            assert version == world.trained and cells
            assert all(roles[c] is T and world.versions[c] != version for c in cells)
        case FinishStep(step, prefix, skip):
            assert step == world.trained + 1 and prefix == num_training >= 1
            assert world.admitted == config.groups_per_step and world.open_micro_steps == 0
            assert not world.admitting and skip is not world.has_bins
            assert not any(world.gradients[prefix:]), "every gradient is in the reduction"
        case Publish(version, install_in):
            burst = min(config.steps_per_burst, system.total_steps - world.published)
            assert version == world.trained == world.published + burst
            assert install_in == tuple(c for c, role in enumerate(roles) if role is R)
        case Checkpoint(step):
            assert step == world.trained == world.published and not world.admitted
    return world._replace(roles=tuple(roles), serial=order)


def _check_waterlevel(world: World, prefix: int, system: System) -> None:
    """What remains covers the waterlevel; with lag and once something is measured, what runs now,
    or nothing where the burst needs no more."""
    config = system.config
    state = state_of(world, system)
    remaining = state.capacity_beyond(prefix, config)
    if world.num_unfinished <= remaining:
        return
    assert config.max_lag_steps > 0 and state.outlook is not None
    ready = state.trainable_groups(config) >= state.groups_to_train(config)
    assert state.num_running <= remaining or (ready and prefix == len(world.roles))


# Events ------------------------------


def events(world: World, system: System) -> Iterator[World]:
    """Everything that can happen next outside the scheduler."""
    if world.serial is not None:
        yield _ended(world)
    if world.admitting:
        for micro_steps in (0, 1):
            yield world._replace(
                admitted=world.admitted + 1,
                admitting=world.admitting - 1,
                open_micro_steps=world.open_micro_steps + micro_steps,
                has_bins=world.has_bins or micro_steps > 0,
            )
    if room_of(world, system.config):
        yield from _executions_end(world)
    if len(world.dead) < min(system.losses, system.num_cells - 1):
        for cell, role in enumerate(world.roles):
            if role is R and cell not in world.dead:
                yield world._replace(dead=tuple(sorted((*world.dead, cell))))
    if world.open_micro_steps:
        for cell, role in enumerate(world.roles):
            if role is T and world.versions[cell] == world.trained:
                gradients = _with(world.gradients, cell, True)
                opened = world.open_micro_steps - 1
                yield world._replace(gradients=gradients, open_micro_steps=opened)
    if world.crashes < system.crashes:
        yield _resumed(world)


def _executions_end(world: World) -> Iterator[World]:
    waiting = world.waiting
    num_waiting = [0] * len(world.unfinished)
    for group in range(len(world.unfinished) - 1, -1, -1):
        num_waiting[group] = min(waiting, world.unfinished[group][1])
        waiting -= num_waiting[group]
    seen = set()
    for group, (version, count) in enumerate(world.unfinished):
        kind = (version, count, num_waiting[group])
        if count == num_waiting[group] or kind in seen:
            continue
        seen.add(kind)
        left = list(world.unfinished)
        left[group] = (version, count - 1)
        started = [g for g, w in zip(left, num_waiting, strict=True) if w == 0 and g[1]]
        others = [g for g, w in zip(left, num_waiting, strict=True) if w > 0]
        ready = world.ready if count > 1 else tuple(sorted((*world.ready, version)))
        # The order among groups that have started whole tells nothing apart: one stands for all.
        yield world._replace(unfinished=(*sorted(started), *others), ready=ready)


def _ended(world: World) -> World:
    """The serial order has been carried out."""
    order = world.serial
    world = world._replace(serial=None)
    match order:
        case Leave(cells):
            assert not any(world.gradients[cell] for cell in cells)
            return world._replace(roles=_with_all(world.roles, cells, T))
        case Return(cells, _):
            assert not any(world.gradients[cell] for cell in cells), "gradients left the step"
            return world._replace(roles=_with_all(world.roles, cells, R))
        case Sync(cells, version):
            assert not any(world.gradients[c] for c in cells), "a sync zeroed gradients in use"
            versions = world.versions
            for cell in cells:
                versions = _with(versions, cell, version)
            return world._replace(versions=versions)
        case FinishStep(step, _, _):
            return world._replace(
                trained=step,
                versions=_with(world.versions, 0, step),
                gradients=(False,) * len(world.roles),
                admitted=0,
                has_bins=False,
                in_batch=(),
                since=tuple(sorted(world.since + world.in_batch)),
            )
        case Publish(version, _):
            versions = (version,) * len(world.roles)
            return world._replace(published=version, versions=versions)
        case Checkpoint(step):
            return world._replace(checkpointed=step, since=())
    raise AssertionError(order)


def _resumed(world: World) -> World:
    """Killed, and started again from the checkpoint; what had finished stays finished."""
    n, step = len(world.roles), world.checkpointed
    return World(
        roles=(R,) * n,
        versions=(step,) * n,
        gradients=(False,) * n,
        unfinished=world.unfinished,
        waiting=world.num_unfinished,
        ready=tuple(sorted(world.ready + world.in_batch + world.since)),
        dead=world.dead,
        trained=step,
        published=step,
        checkpointed=step,
        crashes=world.crashes + 1,
    )


def _with(values: tuple, place: int, value) -> tuple:
    return (*values[:place], value, *values[place + 1 :])


def _with_all(values: tuple, places: tuple[int, ...], value) -> tuple:
    return tuple(value if place in places else old for place, old in enumerate(values))


# Exploration ------------------------------


def _check(world: World, system: System) -> None:
    training = [role is not R for role in world.roles]
    assert training == sorted(training, reverse=True), "training cells are a prefix"
    config = system.config
    depth = (world.published + config.max_lag_steps + config.steps_per_burst) * (
        config.groups_per_step
    )
    if not world.crashes:  # what was dispatched before a kill stays dispatched
        assert _num_dispatched(world, config) <= depth


def decided(world: World, system: System) -> World | None:
    """The world once what `decide` says has begun; None if it says nothing."""
    orders = decide(state_of(world, system), system.config)
    following = world
    for order in orders:
        before, following = following, begin(following, order, system)
        assert following != before, f"{order} changes nothing: the loop would spin"
    return following if orders else None


def explore(system: System) -> int:
    """Visit every reachable state; returns how many. Fails on a broken invariant, and on a state
    from which the end of the run cannot be reached any more."""
    start = start_of(system)
    numbers = {start: 0}
    before: list[list[int]] = [[]]
    ends = []
    queue = deque([start])
    while queue:
        world = queue.popleft()
        number = numbers[world]
        if world.over:
            ends.append(number)
            continue
        _check(world, system)
        following = decided(world, system)
        nexts = list(events(world, system)) + ([following] if following is not None else [])
        assert nexts, f"nothing can happen any more in {world}"
        for after in nexts:
            if after not in numbers:
                numbers[after] = len(before)
                before.append([])
                queue.append(after)
            before[numbers[after]].append(number)
    assert len(_backwards(ends, before)) == len(before), "the end is out of reach of some state"
    return len(before)


def _backwards(ends: list[int], before: list[list[int]]) -> set[int]:
    seen, stack = set(ends), list(ends)
    while stack:
        for number in before[stack.pop()]:
            if number not in seen:
                seen.add(number)
                stack.append(number)
    return seen


def drive(system: System, seed: int, max_events: int = 100_000) -> list[World]:
    """One random life of a system, from its start to its end; returns every state on the way."""
    rng = random.Random(seed)
    world = start_of(system)
    path = [world]
    while not world.over:
        assert len(path) < max_events, "the run does not end"
        _check(world, system)
        following = decided(world, system)
        choices = list(events(world, system))
        # The control loop is quick but not instant: now and then something happens before it.
        if following is not None and (not choices or rng.random() < 0.8):
            world = following
        else:
            assert choices, f"nothing can happen any more in {world}"
            world = rng.choice(choices)
        path.append(world)
    return path
