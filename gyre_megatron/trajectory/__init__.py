"""What executions did and what training receives of it: the store, the processor, the packed form.

with TrajectoryStore("runs/NAME/store.db", read_only=True) as store:
    group = process_group(store, "g000000", ProcessorConfig())
bins = pack(group.trees, token_budget=16_384, num_executions=group.num_counted)
"""

from gyre_megatron.trajectory.admission import pack_group
from gyre_megatron.trajectory.advantages import ADVANTAGES
from gyre_megatron.trajectory.branches import Conservation
from gyre_megatron.trajectory.cost import linear_cost
from gyre_megatron.trajectory.export import branch_rows, write_jsonl, write_parquet
from gyre_megatron.trajectory.fit import Excluded, Problem, Reason, TrainingBounds, split_fitting
from gyre_megatron.trajectory.forest import Forest
from gyre_megatron.trajectory.ledger import Counters
from gyre_megatron.trajectory.packed_bin import PackedBin
from gyre_megatron.trajectory.packing import pack
from gyre_megatron.trajectory.processor import ProcessedGroup, process_group
from gyre_megatron.trajectory.records import Call, ExecutionRecord, GroupRecord, Node, Outcome
from gyre_megatron.trajectory.store import TrajectoryStore
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode

__all__ = [
    "ADVANTAGES",
    "Call",
    "Conservation",
    "Counters",
    "Excluded",
    "ExecutionRecord",
    "ExecutionTree",
    "Forest",
    "GroupRecord",
    "Node",
    "Outcome",
    "PackedBin",
    "Problem",
    "ProcessedGroup",
    "Reason",
    "TrainingBounds",
    "Trajectory",
    "TrajectoryStore",
    "TreeNode",
    "branch_rows",
    "linear_cost",
    "pack",
    "pack_group",
    "process_group",
    "split_fitting",
    "write_jsonl",
    "write_parquet",
]
