"""Tables and trees that a person reads: executions, one execution's tree, counts over a store."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.tree import Tree

from gyre_megatron.trajectory.records import Call, Node
from gyre_megatron.trajectory.store import TrajectoryStore

_ROLE_COLOURS = {
    "main": "green",
    "main_summary": "cyan",
    "sub_agent": "yellow",
    "sub_agent_summary": "magenta",
    "auxiliary": "bright_black",
}
_WIDEST = 100_000


def print_whole(console: Console, view: RenderableType) -> None:
    """Print a view as wide as its cells are: an id that was cut to fit can be neither read nor
    used. A narrow terminal wraps the lines."""
    unbounded = console.options.update(max_width=_WIDEST)
    needed = Measurement.get(console, unbounded, view).maximum
    console.width = max(console.width, needed)
    console.print(view)


def executions_table(store: TrajectoryStore, group_id: str | None) -> Table:
    """One row an execution, in dispatch order."""
    table = Table(
        "execution", "state", "attempt", "outcome", "reward", "calls", "nodes", "tokens", "sampled"
    )
    for execution in store.executions(group_id=group_id):
        outcome = execution.outcome
        reward = "" if outcome is None or outcome.reward is None else f"{outcome.reward:.3f}"
        table.add_row(
            execution.execution_id,
            execution.state,
            str(execution.attempt),
            outcome.status if outcome else "",
            reward,
            *(f"{count:,}" for count in store.sizes(execution.execution_id)),
        )
    return table


def execution_tree(
    store: TrajectoryStore, execution_id: str, attempt: int | None, max_depth: int
) -> Tree:
    """The nodes of one attempt; a chain stays on one level, only where branches part does the tree
    indent."""
    execution = store.execution(execution_id)
    nodes = store.nodes(execution_id, attempt)
    calls = {call.node_id: call for call in store.calls(execution_id, attempt)}
    outcome = execution.outcome
    reward = f", reward {outcome.reward}" if outcome and outcome.reward is not None else ""
    status = outcome.status if outcome else execution.state
    root = Tree(f"[bold]{execution_id}[/] {status}{reward}")
    places: dict[int, tuple[Tree, int]] = {-1: (root, 0)}
    num_children = Counter(node.parent for node in nodes)
    for node in nodes:
        place, depth = places[node.parent]
        if depth == max_depth:
            place.add("...")
        if depth < max_depth:
            branch = place.add(_label(node, calls.get(node.node_id)))
            place = branch if num_children[node.node_id] > 1 else place
        places[node.node_id] = (place, depth + 1)
    return root


def _label(node: Node, call: Call | None) -> str:
    span = f"[bright_black]{node.start:,}..{node.end:,}[/]"
    if call is None:
        return f"context {len(node.token_ids):,} tokens {span}"
    colour = _ROLE_COLOURS.get(call.role, "white")
    logprobs = node.logprobs if len(node.logprobs) else np.zeros(1, np.float32)
    versions = ",".join(dict.fromkeys(str(version) for version, _ in node.versions))
    state = "" if call.state == "complete" else f" [red]{call.state}[/]"
    return (
        f"[{colour}]{call.role}[/] {call.num_output_tokens:,} sampled, "
        f"{call.finish_reason}{state}, log-prob mean "
        f"{logprobs.mean():.3f} min {logprobs.min():.3f}, version {versions or '-'} {span}"
    )


def stats_table(store: TrajectoryStore) -> Table:
    """Counts over the whole store."""
    states, outcomes = Counter[str](), Counter[str]()
    totals = np.zeros(4, np.int64)
    rewards: list[float] = []
    for execution in store.executions():
        states[execution.state] += 1
        totals += store.sizes(execution.execution_id)
        if execution.outcome is not None:
            outcomes[execution.outcome.status] += 1
            if execution.outcome.reward is not None:
                rewards.append(execution.outcome.reward)
    groups = store.groups()
    num_trained = sum(group.trained_step is not None for group in groups)
    table = Table("what", "value")
    table.add_row("groups", f"{len(groups):,} ({num_trained:,} trained)")
    table.add_row("executions", _listed(states))
    table.add_row("outcomes", _listed(outcomes))
    table.add_row("mean reward", f"{np.mean(rewards):.4f}" if rewards else "none")
    for name, value in zip(("calls", "nodes", "tokens", "sampled tokens"), totals, strict=True):
        table.add_row(name, f"{value:,}")
    for role, count in store.calls_by_role().items():
        table.add_row(f"calls as {role}", f"{count:,}")
    size = store.num_bytes()
    bytes_per_token = size / max(int(totals[2]), 1)
    table.add_row("file", f"{size / 2**20:.1f} MiB, {bytes_per_token:.1f} bytes a token")
    return table


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"
