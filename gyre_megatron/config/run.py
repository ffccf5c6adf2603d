"""One run: its length, directory and what it keeps."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gyre_megatron.config.base import Section, UserPath


class RunConfig(Section):
    """Name, length and outputs of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """Directory of the run below `root`: a letter or digit, then letters, digits, dots, dashes and
    underscores."""
    root: UserPath = Path("runs")
    """Where run directories are made, relative to the working directory; all nodes must share
    it."""
    num_steps: int = Field(100, ge=1)
    """Optimizer steps of the run."""
    seed: int = 0
    """Orders the queries; the tiny model has its own seed."""
    checkpoint_interval: int = Field(10, ge=0)
    """Steps between checkpoints; 0 saves only at the end. A checkpoint falls on the next end of a
    burst."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are removed once a new one is complete."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    logprob_gap_limit: float = Field(1e-4, gt=0)
    """Largest allowed difference between trainer and engine log-probabilities of the same tokens,
    in nats; 1e-4 fits fp32, bf16 needs about 0.1."""
    parity_sequences: int = Field(2, ge=0)
    """Sequences compared in each parity check; 0 switches the check off."""
