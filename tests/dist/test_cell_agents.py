"""Cells of real trainers that carry out orders: nothing that a cell trained is lost, whoever joins
when, and a core that sends its weights stays as it was."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.training import GspoConfig, OptimizerConfig, TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.runtime.cell_agent import CellAgent, CellParts
from gyre_megatron.scheduler.orders import CellOrder, FinishStep, Leave, MicroStep, Publish, Sync
from gyre_megatron.trajectory.packing import pack
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.process_groups import CellTopology, CrossCellGroups
from gyre_megatron.weights.pull import CoreReader, CoreWeights
from tests.dist.gradients import make_trainer
from tests.dist.ranks import RankPool
from tests.dist.tiny import VOCAB, make_checkpoint
from tests.unit.random_trees import random_tree

NUM_CELLS = 3
WEIGHTS = WeightsConfig(staging_mib=4, timeout_s=60)
NUM_STEPS = 2
NUM_MICRO_STEPS = 8

Script = list[list[CellOrder]]
"""What each cell is ordered, in order."""

# A large eps makes Adam's update proportional to the gradient: the second step then sees the
# difference that the first one made, and not the sign of rounding errors.
OPTIMIZER = OptimizerConfig(lr=0.1, eps=1.0, clip_grad=0.0)
WIDE = GspoConfig(eps_low=0.9, eps_high=9.0)


@pytest.fixture(scope="module")
def cells():
    """A process for each cell, in a world of its own."""
    pool = RankPool(NUM_CELLS)
    yield pool
    pool.close()


def some_micro_steps(seed: int) -> list[MicroStep]:
    trees = [random_tree(seed + i, vocab=VOCAB, max_children=3) for i in range(4)]
    bins = [pack([tree], 1024, NUM_MICRO_STEPS)[0].to_bytes() for tree in trees]
    return [MicroStep((bins[i % 4],)) for i in range(NUM_MICRO_STEPS)]


def burst(seed: int) -> Script:
    """A burst of two steps in which cells join at random moments and take random micro-steps."""
    rng = random.Random(seed)
    script: Script = [[] for _ in range(NUM_CELLS)]

    def order(to: tuple[int, ...], given: CellOrder) -> None:
        for cell in to:
            script[cell].append(given)

    order((0,), Leave(0))
    prefix = 1
    joins = sorted(rng.sample(range(1, NUM_STEPS * NUM_MICRO_STEPS), NUM_CELLS - 1))
    for step in range(NUM_STEPS):
        for index, micro_step in enumerate(some_micro_steps(100 * step)):
            if step * NUM_MICRO_STEPS + index in joins:
                order((prefix,), Leave(prefix))
                if step > 0:
                    order((0, prefix), Sync((prefix,), version=step))
                prefix += 1
            order((rng.randrange(prefix),), micro_step)
        order(tuple(range(prefix)), FinishStep(step + 1, prefix, skip=False))
        if prefix > 1 and step + 1 < NUM_STEPS:
            order(tuple(range(prefix)), Sync(tuple(range(1, prefix)), version=step + 1))
    order(tuple(range(NUM_CELLS)), Publish(NUM_STEPS, install_in=()))
    return script


def alone() -> list[CellOrder]:
    """The same burst in one cell."""
    orders: list[CellOrder] = [Leave(0)]
    for step in range(NUM_STEPS):
        orders += some_micro_steps(100 * step)
        orders.append(FinishStep(step + 1, 1, skip=False))
    return orders


class Recorded(CellAgent):
    """An agent that keeps the gradients that its optimizer was given."""

    def __init__(self, parts: CellParts) -> None:
        super().__init__(parts, version=0)
        self.trainer = parts.trainer
        self.gradients: list[torch.Tensor] = []
        step = parts.trainer.optimizer_step

        def recording_step() -> dict[str, float]:
            buffers = parts.trainer.gradient_buffers()
            self.gradients.append(torch.cat([b.flatten().clone() for b in buffers]))
            return step()

        parts.trainer.optimizer_step = recording_step

    def weights(self) -> torch.Tensor:
        return torch.cat([b.detach().flatten().clone() for b in self.trainer.parameter_buffers()])


def own_world(folder: str) -> int:
    """Make this process a cell of its own; returns its number. Once in the life of a process."""
    if dist.get_world_size() > 1:
        cell = dist.get_rank()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/world{cell}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        own_world.cell = cell
    return own_world.cell


def agent_of(
    checkpoint: Path,
    config: TrainingConfig,
    groups: CrossCellGroups,
    chain: CellChain,
    kv_store: dist.Store,
    pulls: bool = False,
) -> Recorded:
    is_core = groups.cell == 0
    trainer = make_trainer(checkpoint, config, with_optimizer=is_core)
    core_weights = reader = None
    if is_core:
        core_weights = CoreWeights(trainer.parameter_buffers(), WEIGHTS, kv_store, 0, version=0)
    elif pulls:
        reader = CoreReader.find(WEIGHTS, kv_store, 0)
        assert reader is not None
    parts = CellParts(
        trainer=trainer,
        weight_sync=None,
        groups=groups,
        chain=chain,
        core_weights=core_weights,
        core_reader=reader,
        parity=None,
        directory=None,
        server=None,
        client=None,
    )
    return Recorded(parts)


def groups_of(folder: str, name: str, num_cells: int, cell: int) -> CrossCellGroups:
    store = dist.FileStore(f"{folder}/{name}", num_cells)
    return CrossCellGroups(store, CellTopology(num_cells, num_cells), cell, timedelta(seconds=60))


def chain_of(folder: str, name: str, num_cells: int, cell: int) -> CellChain:
    store = dist.FileStore(f"{folder}/{name}-chain", num_cells)
    return CellChain(WEIGHTS, store, CellTopology(num_cells, num_cells), cell)


def store_of(folder: str, name: str, num_cells: int) -> dist.Store:
    return dist.FileStore(f"{folder}/{name}-core", num_cells)


def pull(agent: Recorded, order: Sync, kv_store: dist.Store) -> None:
    """A sync in which the core takes no part: as the control plane does, nothing that changes its
    weights is ordered meanwhile."""
    key = f"{order.version}-{order.cells}"
    if agent.cell == 0:
        kv_store.set(f"frozen-{key}", "1")
        kv_store.wait([f"taken-{key}-{cell}" for cell in order.cells], timedelta(seconds=60))
        return
    kv_store.wait([f"frozen-{key}"], timedelta(seconds=60))
    agent.carry_out(order)
    kv_store.set(f"taken-{key}-{agent.cell}", "1")


def run_burst(folder: str, name: str, checkpoint: Path, script: Script, pulls: bool):
    """Carry the script out; returns what the core's optimizer was given, what it would have been
    given alone, and the weights at the end."""
    config = TrainingConfig(token_budget=1024, gspo=WIDE, optimizer=OPTIMIZER)
    cell = own_world(folder)
    groups = groups_of(folder, name, NUM_CELLS, cell)
    chain = chain_of(folder, name, NUM_CELLS, cell)
    kv_store = store_of(folder, name, NUM_CELLS)
    agent = agent_of(checkpoint, config, groups, chain, kv_store, pulls)
    for order in script[cell]:
        if pulls and isinstance(order, Sync):
            pull(agent, order, kv_store)
        else:
            agent.carry_out(order)
    if cell != 0:
        return None, None, agent.weights()
    lone = f"{name}-alone", 1, 0
    reference = agent_of(
        checkpoint,
        config,
        groups_of(folder, *lone),
        chain_of(folder, *lone),
        store_of(folder, *lone[:2]),
    )
    for order in alone():
        reference.carry_out(order)
    return agent.gradients, reference.gradients, agent.weights()


@pytest.mark.parametrize("pulls", [True, False], ids=["alone", "helped"])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_has_the_gradient_of_one_cell_whoever_joined_when(
    cells, tmp_path_factory, seed, pulls
):
    folder = tmp_path_factory.mktemp("cells")
    checkpoint = make_checkpoint("dense", folder / "checkpoint")
    script = burst(seed)
    name = f"burst{seed}{pulls}"
    results = cells.run(run_burst, str(folder), name, checkpoint, script, pulls, timeout=240)
    gradients, expected, weights = results[0]
    assert len(gradients) == len(expected) == NUM_STEPS
    for mine, alone_ in zip(gradients, expected, strict=True):
        assert alone_.norm() > 0
        assert (mine - alone_).norm() <= 1e-6 * alone_.norm()
    for _, _, others in results[1:]:
        assert torch.equal(others, weights)


def train_bf16(folder: str, checkpoint: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights after 16 small steps: with and without a publication after each; and before."""
    config = TrainingConfig(
        token_budget=1024,
        gspo=WIDE,
        dtype="bf16",
        optimizer=OptimizerConfig(lr=2e-4, clip_grad=0.0),
    )
    if own_world(folder) != 0:
        return [], torch.zeros(0)
    ends = []
    for publishes in (True, False):
        lone = f"bf16{publishes}", 1, 0
        agent = agent_of(
            checkpoint,
            config,
            groups_of(folder, *lone),
            chain_of(folder, *lone),
            store_of(folder, *lone[:2]),
        )
        before = agent.weights()
        agent.carry_out(Leave(0))
        for step in range(1, 17):
            agent.carry_out(some_micro_steps(0)[0])
            agent.carry_out(FinishStep(step, 1, skip=False))
            if publishes:
                agent.carry_out(Publish(step, install_in=()))
        ends.append(agent.weights())
    return ends, before


def test_publishing_leaves_the_cores_fp32_weights_alone(cells, tmp_path_factory):
    """Steps smaller than bf16 can show add up in the optimizer's fp32 weights only, as long as
    nobody reads those back from bf16."""
    folder = tmp_path_factory.mktemp("bf16")
    checkpoint = make_checkpoint("dense", folder / "checkpoint")
    (published, alone_), before = cells.run(train_bf16, str(folder), checkpoint, timeout=240)[0]
    assert torch.equal(published, alone_)
    assert not torch.equal(published, before)
