"""`gyre trajectory {list,show,export,stats} STORE`: look into a trajectory
store."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from gyre_megatron.errors import GyreError
from gyre_megatron.trajectory.export import branch_rows, write_jsonl, write_parquet
from gyre_megatron.trajectory.records import Call, ExecutionRecord, Node
from gyre_megatron.trajectory.store import TrajectoryStore

_ROLE_COLOURS = {
    "main": "green",
    "main_summary": "cyan",
    "sub_agent": "yellow",
    "sub_agent_summary": "magenta",
    "auxiliary": "bright_black",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        store = TrajectoryStore(options.store, read_only=True)
        try:
            options.run(store, options, console)
        finally:
            store.close()
    except GyreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre trajectory", description="Look into a store.")
    commands = parser.add_subparsers(required=True, metavar="{list,show,export,stats}")
    for name, run, text in (
        ("list", _list, "executions with their state, reward, calls and tokens"),
        ("show", _show, "the tree of one execution"),
        ("export", _export, "branches as .jsonl or .parquet"),
        ("stats", _stats, "counts over the whole store"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("store", type=Path, help="store.db of a run directory")
        command.set_defaults(run=run)
        if name == "show":
            command.add_argument("execution")
            command.add_argument(
                "--attempt", type=int, help="an earlier attempt; default: the last"
            )
            command.add_argument(
                "--max-depth", type=int, default=200, help="nodes shown below each other"
            )
        if name == "export":
            command.add_argument("output", type=Path, help="ends with .jsonl or .parquet")
        if name in ("list", "export"):
            command.add_argument("--group", help="only this group")
    return parser


def _list(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    table = Table(
        "execution", "state", "attempt", "outcome", "reward", "calls", "nodes", "tokens", "sampled"
    )
    for execution in store.executions(group_id=options.group):
        calls, nodes, tokens, sampled = store.sizes(execution.execution_id)
        outcome = execution.outcome
        reward = "" if outcome is None or outcome.reward is None else f"{outcome.reward:.3f}"
        counts = (f"{value:,}" for value in (calls, nodes, tokens, sampled))
        name = outcome.status if outcome else ""
        table.add_row(
            execution.execution_id, execution.state, str(execution.attempt), name, reward, *counts
        )
    console.print(table)


def _show(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    execution = store.execution(options.execution)
    nodes = store.nodes(execution.execution_id, options.attempt)
    calls = {call.node_id: call for call in store.calls(execution.execution_id, options.attempt)}
    console.print(_tree(execution, nodes, calls, options.max_depth))


def _tree(
    execution: ExecutionRecord, nodes: list[Node], calls: dict[int, Call], max_depth: int
) -> Tree:
    outcome = execution.outcome
    reward = f", reward {outcome.reward}" if outcome and outcome.reward is not None else ""
    root = Tree(
        f"[bold]{execution.execution_id}[/] "
        f"{outcome.status if outcome else execution.state}{reward}"
    )
    places: dict[int, tuple[Tree, int]] = {-1: (root, 0)}
    has_siblings = Counter(node.parent for node in nodes)
    for node in nodes:
        # A chain stays on one level: only where branches part does the tree indent.
        place, depth = places[node.parent]
        if depth == max_depth:
            place.add("...")
        if depth < max_depth:
            branch = place.add(_label(node, calls.get(node.node_id)))
            places[node.node_id] = (branch if has_siblings[node.node_id] > 1 else place, depth + 1)
        else:
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


def _export(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    writers = {".jsonl": write_jsonl, ".parquet": write_parquet}
    writer = writers.get(options.output.suffix)
    if writer is None:
        raise GyreError(f"{options.output}: the name must end with one of {', '.join(writers)}")
    count = writer(branch_rows(store, store.executions(group_id=options.group)), options.output)
    console.print(f"{count:,} branches written to {options.output}")


def _stats(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    states, outcomes, totals = Counter[str](), Counter[str](), np.zeros(4, np.int64)
    rewards = []
    for execution in store.executions():
        states[execution.state] += 1
        totals += store.sizes(execution.execution_id)
        if execution.outcome is not None:
            outcomes[execution.outcome.status] += 1
            rewards += [execution.outcome.reward] if execution.outcome.reward is not None else []
    table = Table("what", "value")
    groups = store.groups()
    table.add_row(
        "groups", f"{len(groups):,} ({sum(g.trained_step is not None for g in groups):,} trained)"
    )
    table.add_row(
        "executions", ", ".join(f"{count:,} {name}" for name, count in states.items()) or "none"
    )
    table.add_row(
        "outcomes", ", ".join(f"{count:,} {name}" for name, count in outcomes.items()) or "none"
    )
    table.add_row("mean reward", f"{np.mean(rewards):.4f}" if rewards else "none")
    for name, value in zip(("calls", "nodes", "tokens", "sampled tokens"), totals, strict=True):
        table.add_row(name, f"{value:,}")
    for role, count in store.calls_by_role().items():
        table.add_row(f"calls as {role}", f"{count:,}")
    files = (options.store, options.store.with_name(options.store.name + "-wal"))
    size = sum(file.stat().st_size for file in files if file.exists())
    table.add_row(
        "file", f"{size / 2**20:.1f} MiB, {size / max(int(totals[2]), 1):.1f} bytes a token"
    )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
