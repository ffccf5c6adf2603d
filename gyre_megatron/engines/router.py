"""Where calls go: cells that serve, moved calls, lost engines.

A call that is moved goes on from the tokens already produced, on whichever engine serves next, or
waits until one does; the harness sees one seamless answer. Single asyncio loop, no locks.
Invariant: a token that was yielded is in the prompt of every later engine of that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import aiohttp
import numpy as np

from gyre_megatron.config.rollout import RouterConfig
from gyre_megatron.engines.client import EngineClient
from gyre_megatron.engines.generate import EngineRefused, GenerateRequest, TokenChunk
from gyre_megatron.engines.load_profile import LoadProfile
from gyre_megatron.errors import EngineError

CountName = Literal["rerouted_calls", "lost_calls"]

_MAX_AFFINITIES = 100_000
_MAX_BACKOFF_S = 2.0  # an engine that comes back is found soon


@dataclass(eq=False)
class _Leg:
    """A call's stay on one engine."""

    request_id: str
    leaving: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    deadline: float | None = None
    timeout: asyncio.Timeout | None = None

    def leave(self, grace_s: float) -> None:
        """Give the engine `grace_s` to hand over its last tokens; then the connection is closed."""
        self.leaving = True
        self.deadline = asyncio.get_running_loop().time() + grace_s
        if self.timeout is not None:
            self.timeout.reschedule(self.deadline)


@dataclass(eq=False)
class Engine:
    """A cell's server, as the router sees it."""

    cell_id: int
    client: EngineClient
    capacity: int
    serving: bool = True
    legs: set[_Leg] = field(default_factory=set)
    failures: int = 0
    retry_at: float = 0.0

    @property
    def load(self) -> float:
        """Calls in flight over capacity."""
        return len(self.legs) / self.capacity


class Router:
    """Sends calls to engines and keeps them alive across moves and failures.

    Args:
        config: attempts, pauses and time limits.
        on_count: called for each moved and each lost call.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        on_count: Callable[[CountName], None] = lambda name: None,
    ) -> None:
        self._on_count = on_count
        self.on_leg_ended: Callable[[float], None] = lambda seconds: None
        self.load_profile = LoadProfile()
        self._config = config or RouterConfig()
        self._engines: dict[int, Engine] = {}
        self._order: list[int] = []
        self._affinity: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self.rerouted_calls = 0
        self.lost_calls = 0
        self.engine_failures = 0

    async def close(self) -> None:
        """Close connections to the engines."""
        if self._session is not None:
            await self._session.close()

    # membership ------------------------------

    def add_engine(self, cell_id: int, url: str, capacity: int, serving: bool = True) -> None:
        """Add or replace a cell's engine; `capacity` is the number of calls it runs well at
        once."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        client = EngineClient(url, self._session, self._config)
        self._engines[cell_id] = Engine(cell_id, client, max(capacity, 1), serving)
        if cell_id not in self._order:
            self._order.append(cell_id)
        self._notify()

    def remove_engine(self, cell_id: int) -> None:
        """Forget a cell; its calls in flight go on elsewhere."""
        engine = self._engines.pop(cell_id)
        self._order.remove(cell_id)
        engine.serving = False
        for leg in engine.legs:
            leg.leave(self._config.drain_grace_s)
        self._notify()

    def set_serving(self, cell_id: int, serving: bool) -> None:
        """Let a cell take new calls, or not; calls in flight stay (see drain)."""
        engine = self._engines[cell_id]
        engine.serving = serving
        if serving:
            engine.failures = 0
            engine.retry_at = 0.0
        self._notify()

    def set_preference(self, cell_ids: Sequence[int]) -> None:
        """Order of destinations for moved calls, longest serving first (standalone pool, then later
        cells)."""
        known = [cell_id for cell_id in cell_ids if cell_id in self._engines]
        self._order = known + [cell_id for cell_id in self._order if cell_id not in known]

    def serving_cells(self) -> list[int]:
        """Cells that take new calls."""
        return [cell_id for cell_id in self._order if self._engines[cell_id].serving]

    def num_inflight(self, cell_id: int | None = None) -> int:
        """Calls in flight on a cell, or on all."""
        engines = self._engines.values() if cell_id is None else [self._engines[cell_id]]
        return sum(len(engine.legs) for engine in engines)

    async def drain(self, cell_id: int) -> int:
        """Take a cell out of service: its calls in flight are cut short and go on elsewhere;
        returns how many."""
        engine = self._engines[cell_id]
        engine.serving = False
        legs = list(engine.legs)
        for leg in legs:
            leg.leave(self._config.drain_grace_s)
        await asyncio.gather(*(self._abort(engine, leg) for leg in legs))
        await asyncio.gather(*(leg.gone.wait() for leg in legs))
        return sum(not leg.finished for leg in legs)

    async def _abort(self, engine: Engine, leg: _Leg) -> None:
        # A dead engine needs no abort: its leg notices by itself.
        with contextlib.suppress(EngineError):
            await engine.client.abort(leg.request_id)

    # calls ------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Tokens of one call, whatever happens to engines; the last chunk's finish is stop or
        length.

        Raises:
            EngineRefused: engines say the request itself is wrong.
            EngineError: more failures than `router.max_attempts`.
        """
        produced: list[int] = []
        failures = 0
        moved = False
        while True:
            engine = await self._acquire(request.affinity, moved)
            with self._stay(engine, produced) as leg:
                try:
                    async for chunk in self._leg_chunks(engine, leg, _rest(request, produced)):
                        produced += chunk.token_ids
                        leg.finished = (
                            chunk.finish in ("stop", "length")
                            or len(produced) >= request.max_new_tokens
                        )
                        yield replace(chunk, finish=_finish(chunk) if leg.finished else None)
                        if leg.finished:
                            engine.failures = 0
                            return
                    failures += not leg.leaving
                except EngineRefused:
                    self._count("lost_calls")
                    raise
                except EngineError:
                    if not leg.leaving:
                        failures += 1
                        self._failed(engine)
            self._count("rerouted_calls")
            moved = True
            if failures >= self._config.max_attempts:
                self._count("lost_calls")
                raise EngineError(
                    f"a call was given up after {failures} engine failures, see the engines' logs"
                )
            if not leg.leaving:
                await asyncio.sleep(min(self._config.backoff_s * failures, _MAX_BACKOFF_S))

    @contextlib.contextmanager
    def _stay(self, engine: Engine, produced: list[int]) -> Iterator[_Leg]:
        """A leg on an engine for as long as the block runs, however it ends; its time and the
        tokens that it adds to `produced` are measured."""
        load = engine.load
        before = len(produced)
        began = asyncio.get_running_loop().time()
        leg = _Leg(f"gyre-{secrets.token_hex(8)}")
        engine.legs.add(leg)
        try:
            yield leg
        finally:
            engine.legs.discard(leg)
            seconds = asyncio.get_running_loop().time() - began
            self.load_profile.add(load, seconds, len(produced) - before)
            self.on_leg_ended(seconds)
            leg.gone.set()
            self._notify()

    async def _leg_chunks(
        self, engine: Engine, leg: _Leg, request: GenerateRequest
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one engine until it finishes, aborts, or the leg has left and its grace has
        passed."""
        stream = engine.client.stream(request, leg.request_id)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(leg.deadline) as leg.timeout:
                        chunk = await anext(stream)
                except TimeoutError:
                    return
                finally:
                    leg.timeout = None
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            await stream.aclose()

    async def _acquire(self, affinity: str, moved: bool) -> Engine:
        while True:
            now = asyncio.get_running_loop().time()
            candidates = [self._engines[c] for c in self._order if self._engines[c].serving]
            ready = [engine for engine in candidates if engine.retry_at <= now]
            if ready:
                engine = self._choose(ready, affinity, moved)
                self._remember(affinity, engine.cell_id)
                return engine
            wait = min((engine.retry_at for engine in candidates), default=now + 3600.0) - now
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=max(wait, 0.01))

    def _choose(self, ready: list[Engine], affinity: str, moved: bool) -> Engine:
        free = [engine for engine in ready if engine.load < 1.0]
        if moved and free:
            return free[0]
        home = self._affinity.get(affinity)
        for engine in free:
            if engine.cell_id == home:
                return engine
        return min(ready, key=lambda engine: engine.load)

    def _remember(self, affinity: str, cell_id: int) -> None:
        if affinity:
            self._affinity[affinity] = cell_id
            self._affinity.move_to_end(affinity)
            if len(self._affinity) > _MAX_AFFINITIES:
                self._affinity.popitem(last=False)

    def _failed(self, engine: Engine) -> None:
        engine.failures += 1
        self.engine_failures += 1
        engine.retry_at = asyncio.get_running_loop().time() + min(
            self._config.backoff_s * engine.failures, _MAX_BACKOFF_S
        )

    def _count(self, name: CountName) -> None:
        setattr(self, name, getattr(self, name) + 1)
        self._on_count(name)

    def _notify(self) -> None:
        self._changed.set()


def _finish(chunk: TokenChunk) -> str:
    """A call that ends at its token limit has ended by length, whatever the engine says of it."""
    return "stop" if chunk.finish == "stop" else "length"


def _rest(request: GenerateRequest, produced: list[int]) -> GenerateRequest:
    if not produced:
        return request
    ids = np.concatenate([request.input_ids, np.asarray(produced, np.int32)])
    return replace(request, input_ids=ids, max_new_tokens=request.max_new_tokens - len(produced))
