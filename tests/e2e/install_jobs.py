"""What the training ranks of the install tests do: a real trainer that publishes into a real
server."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.engines.client import EngineHttp
from gyre_megatron.engines.loader import LOADER
from gyre_megatron.errors import TransferError
from gyre_megatron.training import Trainer
from gyre_megatron.training.parallel import parallel_rank
from gyre_megatron.weights.cell_sync import CellWeightSync, PublishError
from gyre_megatron.weights.checkpoint import save_hf_checkpoint
from gyre_megatron.weights.engine import ServingEngine
from gyre_megatron.weights.installer import EngineInstaller
from gyre_megatron.weights.transports.ipc import IpcTransport

TIMEOUT_S = 15.0
_state: dict[str, Any] = {}


def start(
    checkpoint: str,
    url: str,
    engine_tp: int,
    layout: dict[str, int],
    timeout_s: float = TIMEOUT_S,
    transport: str = "auto",
) -> None:
    """Build the trainer and the publisher of this rank."""
    config, architecture = TrainingConfig(**layout), Architecture.from_checkpoint(checkpoint)
    trainer = Trainer(config, architecture, checkpoint, with_optimizer=False)
    place = parallel_rank(config, architecture)
    weights = WeightsConfig(timeout_s=timeout_s, transport=transport)
    http = EngineHttp(url)
    sync = CellWeightSync(
        trainer.model_chunks,
        architecture,
        place,
        ServingEngine(http, engine_tp, LOADER),
        weights,
        name="install",
    )
    wrong = CellWeightSync(
        trainer.model_chunks,
        architecture,
        place,
        ServingEngine(http, engine_tp + 1, LOADER),
        weights,
        name="wrong",
    )
    _state.update(
        trainer=trainer,
        sync=sync,
        wrong=wrong,
        architecture=architecture,
        place=place,
        checkpoint=checkpoint,
    )


@torch.no_grad()
def step() -> None:
    """Change every weight a little."""
    for parameter in _state["trainer"].named_parameters():
        tensor = parameter[1] if isinstance(parameter, tuple) else parameter
        tensor.mul_(1.03125)


def publish(version: int, fault: str | None = None) -> str:
    """Publish; with a fault, what every rank was told."""
    sync = _state["wrong"] if fault == "refusing engine" else _state["sync"]
    if fault == "corrupted":
        _damage_after_writing(sync)
    if fault == "hung" and dist.get_rank() == 2:
        time.sleep(TIMEOUT_S + 3)
    try:
        report = sync.publish(version)
    except TransferError as error:
        return str(error)
    assert report.version == version and report.bytes_written > 0
    return ""


def publish_with_engine_stopped(version: int, before: str, pids: list[int]) -> dict[str, Any]:
    """Publish; the leader stops the engine's schedulers before it sends the command or path
    `before`. Returns what this rank was told."""
    sync = _state["sync"]
    if sync._engine is not None:
        _stop_before(sync._engine, before, pids)
    start = time.monotonic()
    try:
        sync.publish(version)
        return {"state": "committed", "message": "", "seconds": time.monotonic() - start}
    except PublishError as error:
        return {
            "state": error.outcome.state,
            "held": error.outcome.held,
            "served": error.outcome.served,
            "message": str(error),
            "seconds": time.monotonic() - start,
        }


def forget() -> None:
    """What the ranks of a cell do when its engine was replaced."""
    _state["sync"].close()


def _stop_before(installer: EngineInstaller, before: str, pids: list[int]) -> None:
    command, post = installer.command, installer._post

    def stop() -> None:
        installer.command, installer._post = command, post  # only once
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def stopping_command(op, *args, **kwargs):
        if op == before:
            stop()
        return command(op, *args, **kwargs)

    def stopping_post(path, body):
        if path == before:
            stop()
        return post(path, body)

    installer.command, installer._post = stopping_command, stopping_post


def _damage_after_writing(sync: CellWeightSync) -> None:
    """Rank 0 changes an element of a shadow that it holds, after everybody has written."""
    if dist.get_rank() != 0:
        return
    write = sync._write

    def damaged():
        sums = write()
        sync._write = write  # only once
        assert sync._plan is not None
        tensor = next(iter(sync._plan.shadows[0].tensors.values()))
        tensor.view(-1)[5] += 1
        return sums

    sync._write = damaged  # type: ignore[method-assign]


def publish_often(times: int, first: int) -> list[int]:
    """File descriptors of this rank after a tenth of the publishes, and after all."""
    counts = []
    for number in range(times):
        _state["sync"].publish(first + number)
        if number in (times // 10, times - 1):
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def score(sequences: list[list[int]]) -> list[Any]:
    return _state["trainer"].score(sequences)


def save(path: str) -> None:
    """Write the trainer's weights as a checkpoint."""
    store = dist.distributed_c10d._get_default_store()
    carrier = IpcTransport(store, dist.get_rank(), dist.get_world_size(), name=f"save{path}")
    save_hf_checkpoint(
        _state["trainer"].model_chunks,
        _state["architecture"],
        _state["place"],
        carrier,
        path,
        _state["checkpoint"],
        torch.float32,
    )
    carrier.close()


def documented_example(code: str, url: str, engine_tp: int) -> int:
    """Run an example of the pages as it stands, with this rank's model."""
    names = dict(
        model=_state["trainer"].model_chunks,
        checkpoint=_state["checkpoint"],
        engine_url=url,
        engine_tp=engine_tp,
        architecture=_state["architecture"],
        config=_state["trainer"].model_chunks[0].config,
    )
    exec(compile(code, "an example of the pages", "exec"), names)
    return names["report"].version
