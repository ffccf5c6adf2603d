"""`gyre trajectory {list,show,stats,export,copy} STORE`: look into a trajectory store.

Reads only, also while a run writes. Also `python -m gyre_megatron.trajectory`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gyre_megatron.errors import ConfigError, GyreError
from gyre_megatron.trajectory import views
from gyre_megatron.trajectory.export import branch_rows, write_jsonl, write_parquet
from gyre_megatron.trajectory.store import TrajectoryStore

_WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with TrajectoryStore(options.store, read_only=True) as store:
            options.run(store, options, Console())
    except GyreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre trajectory", description="Look into the executions of a run."
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,stats,export,copy}")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("store", type=Path, help="store.db of a run directory")
        added.set_defaults(run=run)
        return added

    listing = command("list", _list, "executions with their state, reward, calls and tokens")
    listing.add_argument("--group", help="only this group")
    show = command("show", _show, "the tree of one execution")
    show.add_argument("execution")
    show.add_argument("--attempt", type=int, help="an earlier attempt; default: the last")
    show.add_argument("--max-depth", type=int, default=200, help="nodes shown below each other")
    command("stats", _stats, "counts over the whole store")
    export = command("export", _export, "branches as .jsonl or .parquet")
    export.add_argument("output", type=Path, help="ends with .jsonl or .parquet")
    export.add_argument("--group", help="only this group")
    copy = command("copy", _copy, "one whole file of the store, also while a run writes")
    copy.add_argument("output", type=Path, help="a file that does not exist")
    return parser


def _list(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    if options.group is not None:
        store.group(options.group)  # a group that does not exist is an error, not an empty table
    views.print_whole(console, views.executions_table(store, options.group))


def _show(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    tree = views.execution_tree(store, options.execution, options.attempt, options.max_depth)
    views.print_whole(console, tree)


def _stats(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    views.print_whole(console, views.stats_table(store))


def _export(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    write = _WRITERS.get(options.output.suffix)
    if write is None:
        raise ConfigError(f"{options.output}: the name must end with one of {', '.join(_WRITERS)}")
    if options.group is not None:
        store.group(options.group)
    executions = store.executions(group_id=options.group)
    num_branches = write(branch_rows(store, executions), options.output)
    console.print(f"{num_branches:,} branches written to {options.output}")


def _copy(store: TrajectoryStore, options: argparse.Namespace, console: Console) -> None:
    store.copy_to(options.output)
    console.print(f"{store.path} copied to {options.output}")


if __name__ == "__main__":
    sys.exit(main())
