"""Training with Megatron-Core on packed trees. The only room that imports megatron."""

from gyre_megatron.cpu import megatron as megatron_cpu

megatron_cpu.install()  # before anything below imports megatron

from gyre_megatron.training.layer_spec import tree_layer_spec  # noqa: E402
from gyre_megatron.training.trainer import Trainer  # noqa: E402

__all__ = ["Trainer", "tree_layer_spec"]
