"""How devices are grouped, where the processes live, and the SGLang server of each cell."""

from __future__ import annotations

from pydantic import Field, model_validator

from gyre_megatron.config.base import Section


class ClusterConfig(Section):
    """Cells and the control plane."""

    num_cells: int = Field(2, ge=1)
    """Number of equal cells; torchrun must start a multiple of this many ranks. Cell 0 is the core
    cell."""
    host: str = "127.0.0.1"
    """Address the control plane binds and advertises; the head node's address on a cluster."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the control plane; 0 takes a free one."""
    collective_timeout_s: float = Field(120.0, gt=0)
    """A collective inside or across cells that takes longer fails the step: long enough for a
    publish, short enough that a dead cell is noticed."""
    start_timeout_s: float = Field(300.0, gt=0)
    """How long cells may take to start their engines and load the model."""
    order_poll_s: float = Field(10.0, gt=0)
    """How long a cell's request for its next order is held open before it is asked again."""


class EngineConfig(Section):
    """The SGLang server of every cell. Its tensor parallelism covers the cell's devices unless
    set."""

    tp: int | None = Field(None, ge=1)
    """Tensor-parallel size of the server; default: the number of ranks in a cell."""
    ep: int = Field(1, ge=1)
    """Expert-parallel ranks among them."""
    dtype: str = "bfloat16"
    context_length: int | None = Field(None, ge=64)
    """Longest sequence (prompt and answer) in tokens; longer prompts are answered with the
    dialect's overflow error. Default: the model's own context, or the KV cache where that is
    smaller."""
    max_total_tokens: int | None = Field(None, ge=64)
    """Size of the KV cache in tokens; default: SGLang decides from free memory."""
    max_running_requests: int | None = Field(None, ge=1)
    """Requests decoded at once; default: four for each execution that a cell holds
    (scheduler.cell_capacity), which may run sub-agents."""
    mem_fraction_static: float = Field(0.8, gt=0, lt=1)
    """Share of the device's memory for weights and KV cache while the cell serves."""
    start_timeout_s: float = Field(240.0, gt=0)
    """How long the server may take to answer its health check."""
    num_threads: int = Field(1, ge=1)
    """OpenMP threads of the server on a CPU."""
    extra_args: list[str] = Field(default_factory=list)
    """More arguments for sglang.launch_server, passed through as they are. Those that a key of
    this section stands for are refused: the limits of a run would no longer agree."""

    @model_validator(mode="after")
    def _one_owner(self) -> EngineConfig:
        for word in self.extra_args:
            flag = word.partition("=")[0]
            # The server's parser takes any prefix of a flag that is unambiguous.
            owners = [key for own, key in _OWN_FLAGS.items() if own.startswith(flag)]
            if flag.startswith("--") and len(flag) > 2 and owners:
                raise ValueError(f"extra_args holds {word}; set engine.{owners[0]} instead")
        return self


_OWN_FLAGS = {
    "--context-length": "context_length",
    "--max-total-tokens": "max_total_tokens",
    "--max-running-requests": "max_running_requests",
    "--mem-fraction-static": "mem_fraction_static",
    "--dtype": "dtype",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--ep-size": "ep",
    "--expert-parallel-size": "ep",
}
"""SGLang's arguments that the section's own keys stand for."""
