"""The life of one torchrun rank: find the others, start what its cell needs, then follow orders.

rendezvous -> (rank 0) model checkpoint and control plane -> (leaders) SGLang server
           -> Megatron trainer -> (resuming) core's checkpoint to every cell -> register -> orders
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gyre_megatron import training
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.cpu import enable_cpu
from gyre_megatron.engines.loader import LOADER
from gyre_megatron.engines.server import ServerSpec, SglangServer
from gyre_megatron.errors import CellError, ConfigError, GyreError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.runtime.cell_agent import CellAgent, CellParts, take_core_weights
from gyre_megatron.runtime.checks import check_architecture, check_inputs, check_layout, limits_of
from gyre_megatron.runtime.control_client import ControlClient
from gyre_megatron.runtime.control_process import ControlProcess
from gyre_megatron.runtime.parity import ParityCheck
from gyre_megatron.runtime.protocol import (
    LOGPROB_GAP,
    Register,
    Started,
    StartFailed,
    encode_start,
    start_decoder,
)
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.training.extensions import check_extensions
from gyre_megatron.weights.cell_sync import CellWeightSync
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.engine import ServingEngine
from gyre_megatron.weights.network import local_address
from gyre_megatron.weights.process_groups import CellTopology, CrossCellGroups
from gyre_megatron.weights.pull import CoreReader, CoreWeights

TINY_MODEL_MAKERS: ExtensionPoint = ExtensionPoint(
    "model.tiny.maker", parameters=("config", "path"), returns="the checkpoint's directory"
)


_START_KEY = "gyre/start"
"""Where rank 0 leaves `Started` or `StartFailed` for everybody."""


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands.

    Attributes:
        store: the job's key-value store, shared by all ranks.
        rank: global rank.
        topology: cells of the job.
    """

    store: dist.Store
    rank: int
    topology: CellTopology

    @property
    def cell(self) -> int:
        return self.topology.cell_of(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.topology.position_of(self.rank) == 0


def run_rank(config: GyreConfig, config_arguments: list[str], resume: bool) -> None:
    """Take part in a run until it ends.

    Args:
        config: the resolved configuration.
        config_arguments: command-line words that load the same configuration, for the control
            plane's process.
        resume: go on from the run directory's latest checkpoint.

    Raises:
        GyreError: configuration, cell, engine or run failed; the message says how to mend it.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    place = RankPlace(store, rank, CellTopology(world_size, config.cluster.num_cells))
    if not torch.cuda.is_available():
        enable_cpu()  # before the trainer's modules, and Megatron with them, are imported
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    control = None
    try:
        if rank == 0:
            control = _start_control_plane(config, config_arguments, resume, place)
        started = _agree_on_start(place, config.cluster.start_timeout_s)
        config = limits_of(config, Path(started.checkpoint)).apply(config)
        reason = _run_cell(config, place, started)
        if reason:
            raise CellError(reason)
        if control is not None:
            control.wait()
    except GyreError as error:
        # Ranks that wait for rank 0 end with its message; to those that have started it is nothing.
        store.set(_START_KEY, encode_start(StartFailed(str(error))))
        raise
    finally:
        if control is not None:
            control.stop()


def _start_control_plane(
    config: GyreConfig, config_arguments: list[str], resume: bool, place: RankPlace
) -> ControlProcess:
    _check_address(config)
    check_inputs(config)
    checkpoint = resolve_checkpoint(config)
    architecture = Architecture.from_checkpoint(checkpoint, config.model.family)
    check_architecture(config, architecture)
    check_layout(config, architecture, place.topology)
    check_extensions(config.training, "cuda" if torch.cuda.is_available() else "cpu")
    limits_of(config, checkpoint)  # every process derives them for itself; here they are checked
    directory = RunDirectory(config.run.root / config.run.name)
    control = ControlProcess(
        config_arguments, checkpoint, place.topology.ranks_per_cell, resume, directory
    )
    endpoint = control.wait_until_ready(config.cluster.start_timeout_s)
    latest = directory.latest_checkpoint() if resume else None
    step = latest.step if latest else 0
    started = Started(endpoint.url, endpoint.token, step, str(checkpoint))
    place.store.set(_START_KEY, encode_start(started))
    return control


def resolve_checkpoint(config: GyreConfig) -> Path:
    """The Hugging Face checkpoint of the run; makes the tiny one if the config asks for it."""
    if config.model.checkpoint is not None:
        return Path(config.model.checkpoint).resolve()
    assert config.model.tiny is not None  # load_config allows no third way
    make = TINY_MODEL_MAKERS.load(config.model.tiny.maker)
    return make(config.model.tiny, config.model.tiny.directory(config.run.root))


def _agree_on_start(place: RankPlace, timeout_s: float) -> Started:
    place.store.wait([_START_KEY], timedelta(seconds=timeout_s))
    message = start_decoder.decode(place.store.get(_START_KEY))
    if isinstance(message, StartFailed):
        raise CellError(message.message)
    return message


def _run_cell(config: GyreConfig, place: RankPlace, started: Started) -> str:
    """Start engine and trainer, register, follow orders; returns the reason for the stop."""
    directory = RunDirectory(config.run.root / config.run.name)
    client = ControlClient(started.url, started.token, place.cell, config.cluster.order_poll_s)
    server = None
    try:
        if place.is_leader:
            server = _start_server(config, place, directory, Path(started.checkpoint))
        # The engine loads its weights while this process builds its model.
        parts = _build_parts(config, place, started, client, server)
        agent = CellAgent(parts, started.step)
        if server is not None:
            server.wait_until_ready()
        dist.barrier()
        _register(agent, parts, started.step)
        return agent.run()
    except GyreError as error:
        client.fail(f"rank {place.rank}: {type(error).__name__}: {error}")
        raise
    finally:
        if server is not None:
            server.stop()


def _check_address(config: GyreConfig) -> None:
    """Refuse a loopback address where other nodes must reach the control plane."""
    if not _on_one_node() and config.cluster.host.startswith("127."):
        raise ConfigError(
            f"the job spans nodes, but cluster.host={config.cluster.host} can be reached from its "
            "own node only; "
            "set it to the address of the node that runs rank 0"
        )


def _on_one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _engine_host(config: GyreConfig, place: RankPlace) -> str:
    """This node's own address; the control plane's where there is only one node."""
    if _on_one_node():
        return config.cluster.host
    return local_address(config.weights.interface, place.store)


def _start_server(
    config: GyreConfig, place: RankPlace, directory: RunDirectory, checkpoint: Path
) -> SglangServer:
    spec = ServerSpec(
        checkpoint=checkpoint,
        tp=config.engine.tp or place.topology.ranks_per_cell,
        device="cuda" if torch.cuda.is_available() else "cpu",
        host=_engine_host(config, place),
        port=0,
        log_file=directory.log_file(f"engine_cell{place.cell}"),
        base_gpu_id=int(os.environ.get("LOCAL_RANK", "0")),
    )
    server = SglangServer(spec, config.engine)
    server.start()
    return server


def _build_parts(
    config: GyreConfig,
    place: RankPlace,
    started: Started,
    client: ControlClient,
    server: SglangServer | None,
) -> CellParts:
    """Build this rank's trainer and connections; collective over the job."""
    groups = _connect(config, place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chain = CellChain(config.weights, place.store, place.topology, place.rank, device)
    checkpoint = Path(started.checkpoint)
    architecture = Architecture.from_checkpoint(checkpoint, config.model.family)
    directory = RunDirectory(config.run.root / config.run.name)
    trainer = training.Trainer(
        config.training, architecture, checkpoint, with_optimizer=place.cell == 0
    )
    if started.step > 0:
        _restore(trainer, chain, place.topology, directory)
    core_weights, core_reader = _open_core(config.weights, place, trainer, started.step)
    engine_tp = config.engine.tp or place.topology.ranks_per_cell
    engine = ServingEngine(server, engine_tp, LOADER) if server else None
    weight_sync = CellWeightSync(
        trainer.model_chunks, architecture, trainer.parallel_rank(), engine, config.weights
    )
    parity = ParityCheck(config.run.parity_sequences, architecture.vocab_size, config.run.seed)
    return CellParts(
        trainer=trainer,
        weight_sync=weight_sync,
        groups=groups,
        chain=chain,
        core_weights=core_weights,
        core_reader=core_reader,
        parity=parity,
        directory=directory,
        server=server,
        client=client if place.is_leader else None,
    )


def _open_core(
    config: WeightsConfig, place: RankPlace, trainer: training.Trainer, version: int
) -> tuple[CoreWeights | None, CoreReader | None]:
    """The core's end, or a satellite's, of reading the core's weights without its help."""
    position = place.topology.position_of(place.rank)
    if place.cell == 0:
        buffers = trainer.parameter_buffers()
        return CoreWeights(buffers, config, place.store, position, version), None
    reader = CoreReader.find(config, place.store, position)
    found: list[bool] = [False] * place.topology.ranks_per_cell
    dist.all_gather_object(found, reader is not None)
    return None, reader if all(found) else None


def _connect(config: GyreConfig, place: RankPlace) -> CrossCellGroups:
    """Make the cell's own world and the groups to other cells."""
    timeout = timedelta(seconds=config.cluster.collective_timeout_s)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"gyre/cell{place.cell}", place.store),
        rank=place.topology.position_of(place.rank),
        world_size=place.topology.ranks_per_cell,
        timeout=timeout,
    )
    address = local_address(config.weights.interface, place.store)
    return CrossCellGroups(place.store, place.topology, place.rank, timeout, address)


def _restore(
    trainer: training.Trainer, chain: CellChain, topology: CellTopology, directory: RunDirectory
) -> None:
    """The core reads the latest checkpoint; every other cell takes its weights from the core."""
    if chain.cell == 0:
        latest = directory.latest_checkpoint()
        if latest is None:
            raise CellError(
                f"the checkpoint in {directory.checkpoints} disappeared while the run was starting"
            )
        trainer.load_checkpoint(latest.directory)
    take_core_weights(trainer, chain, range(1, topology.num_cells))


def _register(agent: CellAgent, parts: CellParts, step: int) -> None:
    """Bring the engine to the trainer's weights where a checkpoint moved them, then announce the
    cell."""
    # While no call is in flight: what the engine refuses is known now, and no publish pauses for it.
    parts.weight_sync.attach()
    metrics = agent.install(step) if step > 0 else agent.measure_parity()
    if parts.client is not None and parts.server is not None:
        gap = metrics[LOGPROB_GAP]
        parts.client.register(
            Register(
                parts.server.url, version=step, logprob_gap=gap, pulls=parts.core_reader is not None
            )
        )
