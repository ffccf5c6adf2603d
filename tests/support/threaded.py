"""A proxy and its engine on an event loop in another thread, for tests that are not coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from gyre_megatron.config.rollout import RolloutConfig
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.scripted_engine import Policy, ScriptedEngine

T = TypeVar("T")


class ThreadedProxy:
    """Serves from construction to close()."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        template: str = "chatml",
        config: RolloutConfig | None = None,
        context_length: int = 8192,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: ScriptedEngine = self.run(ScriptedEngine(policy, version=1).start())
        self._serving = running_proxy(folder, [self.engine], template, config, context_length)
        self.proxy: RunningProxy = self.run(self._serving.__aenter__())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        """Stop serving."""
        self.run(self._serving.__aexit__(None, None, None))
        self.run(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
