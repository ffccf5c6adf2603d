"""Which groups a step may train without making another one too old.

A group that was dispatched under version v is trained by the step that starts from version t; its
staleness is t - v, and it may be trained while t <= v + bound. Steps take the groups that finish
first, but a slot is kept for every unfinished group whose last step it is: earliest deadline first,
with reservations. Pure, on sorted tuples of versions.

Invariant: if every set of untrained groups fits into the slots before its deadlines now, it still
does after an admission of `num_admissible` groups. A dispatch keeps that too as long as the bound
is at least phi + mu - 1, so nothing is ever dropped: a step waits for the groups that it owes.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_admissible(
    ready: Sequence[int],
    unfinished: Sequence[int],
    step: int,
    free: int,
    groups_per_step: int,
    bound: int,
) -> int:
    """How many of the oldest ready groups the step in progress may take now.

    Args:
        ready: dispatch versions of the groups that are finished and not admitted, ascending.
        unfinished: dispatch versions of the groups that still run, ascending.
        step: version that the step in progress starts from.
        free: groups that it still lacks.
        groups_per_step: B.
        bound: largest staleness allowed.
    """
    most = min(free, len(ready))
    if not unfinished or not ready or unfinished[0] >= ready[-1]:
        return most  # whoever is older than somebody ready is ready too
    owed = [
        (version, _slots_until(version, step, free, groups_per_step, bound) - number)
        for number, version in enumerate(unfinished, 1)
    ]
    for taken in range(most):
        if any(spare <= taken for version, spare in owed if version < ready[taken]):
            return taken
    return most


def _slots_until(version: int, step: int, free: int, groups_per_step: int, bound: int) -> int:
    """Slots in which a group of `version` can still be trained."""
    return free + groups_per_step * max(version + bound - step, 0)
