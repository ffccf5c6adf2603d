"""The names and parameters of `gyre_megatron.trajectory` that others may rely on.

A change here breaks programs of users: say so in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass

from gyre_megatron import trajectory

FUNCTIONS = {
    "branch_rows": "store, executions",
    "linear_cost": "architecture",
    "pack": "trees, token_budget, num_executions, *, denominator, constant_length, "
    "keep_executions_whole, linear_cost, skip_zero_advantage",
    "pack_group": "group, training, groups_per_step, linear_cost",
    "process_group": "store, group_id, config, bounds",
    "split_fitting": "trees, bounds",
    "write_jsonl": "rows, path",
    "write_parquet": "rows, path, rows_per_group",
}
STORE = {
    "add_call": "call, nodes",
    "add_group": "group_id, query, num_executions, weight_version",
    "authenticate": "token",
    "calls": "execution_id, attempt",
    "calls_by_role": "",
    "checkpoint": "",
    "close": "",
    "copy_to": "path",
    "counters": "",
    "execution": "execution_id",
    "executions": "states, group_id",
    "finish_execution": "execution_id, outcome",
    "finished_groups": "",
    "group": "group_id",
    "groups": "",
    "mark_trained": "group_ids, step",
    "new_node_id": "",
    "nodes": "execution_id, attempt",
    "num_bytes": "",
    "num_finished_groups": None,
    "num_groups": None,
    "num_queued": None,
    "queued": "limit",
    "requeue_running": "",
    "rollback_to_step": "step",
    "set_call_state": "call_ids, state",
    "sizes": "execution_id",
    "start_execution": "execution_id",
    "unfinished_versions": None,
    "weight_version": "group_id",
}
RECORDS = {
    "Counters": "dispatched finished started",
    "Excluded": "execution_id problem",
    "ExecutionTree": "advantage execution_id group_id nodes owner reward trajectories",
    "Problem": "detail reason",
    "ProcessedGroup": "conservation excluded group_id rewards statuses trees",
    "TrainingBounds": "keep_executions_whole oldest_version token_budget",
    "Trajectory": "leaf role",
    "TreeNode": "behaviour_logprobs parent routed_experts temperatures token_ids trainable "
    "weight_versions",
}


def parameters(function) -> str:
    """Names in order, `*` where keywords begin, without self and annotations."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return ", ".join(name for name in names if name != "self")


def test_functions() -> None:
    found = {
        name: parameters(getattr(trajectory, name))
        for name in trajectory.__all__
        if inspect.isfunction(getattr(trajectory, name))
    }
    assert found == FUNCTIONS


def test_methods_of_the_store() -> None:
    found = {
        name: parameters(member) if callable(member) else None
        for name, member in inspect.getmembers(trajectory.TrajectoryStore)
        if not name.startswith("_")
    }
    assert found == STORE


def test_fields_of_records() -> None:
    for name, expected in RECORDS.items():
        kind = getattr(trajectory, name)
        names = [f.name for f in fields(kind)] if is_dataclass(kind) else kind._fields
        assert " ".join(sorted(names)) == expected, name


def test_every_name_is_there() -> None:
    assert sorted(trajectory.__all__) == trajectory.__all__
    assert all(hasattr(trajectory, name) for name in trajectory.__all__)
    assert set(FUNCTIONS) | set(RECORDS) <= set(trajectory.__all__)
