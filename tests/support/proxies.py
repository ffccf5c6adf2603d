"""A proxy with its store and router, served on a free port in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_engine import ScriptedEngine


@dataclass
class RunningProxy:
    """What a test talks to."""

    url: str
    store: TrajectoryStore
    router: Router
    renderer: Renderer
    config: RolloutConfig

    def start_execution(self, group_id: str = "g") -> tuple[str, str]:
        """A new execution; returns its id and bearer token."""
        execution_id = self.store.add_group(group_id, {"task": "t"}, 1, 0)[0]
        return execution_id, self.store.start_execution(execution_id)


@contextlib.asynccontextmanager
async def running_proxy(
    folder: Path,
    engines: list[ScriptedEngine],
    template: str = "chatml",
    config: RolloutConfig | None = None,
    context_length: int = 8192,
    checkpoint: Path | None = None,
) -> AsyncIterator[RunningProxy]:
    """Serve until the block ends; without a checkpoint one with `template` and no weights is
    made."""
    config = config or RolloutConfig()
    store = TrajectoryStore(folder / "store.db")
    router = Router(config.router)
    checkpoint = checkpoint or make_checkpoint(folder / "checkpoint", template, context_length)
    renderer = Renderer.from_checkpoint(checkpoint, config.proxy)
    for cell_id, engine in enumerate(engines):
        router.add_engine(cell_id, engine.url, capacity=16)
    app = create_proxy_app(store, router, renderer, config)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([sock]))
        try:
            yield RunningProxy(
                f"http://127.0.0.1:{sock.getsockname()[1]}", store, router, renderer, config
            )
        finally:
            server.should_exit = True
            server.force_exit = True
            await serving
            await router.close()
            store.close()
