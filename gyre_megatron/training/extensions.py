"""What users can bring to training, checked before a run takes anything.

Called by rank 0 at a run's start and by nobody else; the trainer loads what it uses itself.
"""

from __future__ import annotations

from gyre_megatron.algos.extensions import load_objective
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training.attention_cores import load_attention_core


def check_extensions(config: TrainingConfig, device_type: str) -> None:
    """Load every extension that the training section names, and drop it.

    Args:
        device_type: where the model will be, "cpu" or "cuda".

    Raises:
        ConfigError: one is unknown, does not import, or cannot do its work there; the message names
            the key.
    """
    load_objective(config)
    load_attention_core(config.attention, device_type)
