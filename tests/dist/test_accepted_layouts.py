"""What the layout rules accept, real Megatron builds: every layout of a grid on four ranks."""

from __future__ import annotations

import itertools

import pytest

from gyre_megatron.config.layout_rules import check_training
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.training import Trainer
from gyre_megatron.weights.megatron import bind, layout_of
from tests.dist.tiny import CONFIGS

RANKS = 4
SIZES = itertools.product((1, 2, 4), (1, 2, 4), (None, 2), (1, 2), (1, 2, 4), (None, 1, 2))
NAMES = ("tp", "pp", "vpp", "cp", "ep", "etp")
GRID = [dict(zip(NAMES, sizes, strict=True)) for sizes in SIZES if sizes[2] is None or sizes[1] > 1]


def accepted(architecture: Architecture) -> list[TrainingConfig]:
    """Layouts of the grid that the rules let pass on four ranks."""
    found = []
    for sizes in GRID:
        training = TrainingConfig(**sizes)
        try:
            check_training(training, architecture, RANKS)
        except ConfigError:
            continue
        found.append(training)
    return found


def build_all(architecture: Architecture, layouts: list[TrainingConfig]) -> int:
    """Build the trainer in each layout, and match its modules with the layout's description."""
    from megatron.core import parallel_state as mpu

    for training in layouts:
        mpu.destroy_model_parallel()
        trainer = Trainer(training, architecture, with_optimizer=False)
        place = trainer.parallel_rank()
        bind(layout_of(architecture, place, trainer.model_chunks), place.index, trainer.model_chunks)
    return len(layouts)


KINDS = pytest.mark.parametrize("kind", ["dense", "moe", "hybrid"])


@KINDS
def test_megatron_builds_what_is_accepted(kind: str, ranks) -> None:
    """Every fifth layout; `make test-slow` builds them all."""
    architecture = Architecture.from_hf(CONFIGS[kind])
    layouts = accepted(architecture)
    assert len(GRID) > 2 * len(layouts) > 8
    some = layouts[::5]
    assert ranks(RANKS).run(build_all, architecture, some) == [len(some)] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(1500)
@KINDS
def test_megatron_builds_all_that_is_accepted(kind: str, ranks) -> None:
    architecture = Architecture.from_hf(CONFIGS[kind])
    layouts = accepted(architecture)
    for start in range(0, len(layouts), 10):
        some = layouts[start : start + 10]
        assert ranks(RANKS).run(build_all, architecture, some) == [len(some)] * RANKS
