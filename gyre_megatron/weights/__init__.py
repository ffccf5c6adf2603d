"""The hot-swap layer: exact resharding between any Megatron layout and any SGLang layout.

Usable without the rest of the package; docs/hot_swap.md shows how in twenty lines.
"""

from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.cell_sync import CellWeightSync, PublishError, PublishReport
from gyre_megatron.weights.chain import CellChain, chain_broadcast
from gyre_megatron.weights.checkpoint import (
    hf_named_tensors,
    load_hf_checkpoint,
    save_hf_checkpoint,
    wire_dtypes,
)
from gyre_megatron.weights.engine import ServingEngine
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.megatron import MegatronLayout, bind, layout_of
from gyre_megatron.weights.megatron_names import MegatronStyle
from gyre_megatron.weights.parallel import Parallelism, ParallelRank
from gyre_megatron.weights.planner import plan_rank
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport
from gyre_megatron.weights.transports.choose import Peers, open_transport
from gyre_megatron.weights.transports.collective import CollectiveTransport

__all__ = [
    "CellChain",
    "CellWeightSync",
    "CollectiveTransport",
    "Inbox",
    "MegatronLayout",
    "MegatronStyle",
    "Outbox",
    "ParallelRank",
    "Parallelism",
    "Peers",
    "PublishError",
    "PublishReport",
    "Resharder",
    "ServingEngine",
    "Transport",
    "bind",
    "canonical_tensors",
    "chain_broadcast",
    "hf_named_tensors",
    "layout_of",
    "load_hf_checkpoint",
    "open_transport",
    "plan_rank",
    "save_hf_checkpoint",
    "wire_dtypes",
]
