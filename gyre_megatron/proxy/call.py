"""The life of one call: prompt ids to the router, sampled ids to the harness and to the store.

Invariant: the last bytes of an answer are handed out only after the call is committed; a call whose
harness hung up is kept as undelivered and never followed or trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.generate import EngineRefused, GenerateRequest, TokenChunk
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import EngineError, GyreError
from gyre_megatron.proxy.dialects.base import Answer, Dialect, StreamWriter
from gyre_megatron.proxy.sessions import Session
from gyre_megatron.text.conversation import BadRequest, CallRequest, answer_key
from gyre_megatron.text.output_parser import OutputEvent, OutputParser
from gyre_megatron.text.renderer import Prompt, Renderer
from gyre_megatron.text.token_text import TokenDecoder
from gyre_megatron.trajectory.records import Call, CallState, Node
from gyre_megatron.trajectory.routed_experts import RouteRecorder
from gyre_megatron.trajectory.store import TrajectoryStore

log = logging.getLogger(__name__)


@dataclass
class CallContext:
    """Everything a call needs from its surroundings."""

    store: TrajectoryStore
    router: Router
    renderer: Renderer
    config: RolloutConfig


@dataclass
class Sampled:
    """Columns of what the policy produced so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions

    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, count) runs."""
        runs: list[tuple[int, int]] = []
        for version in self.versions:
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + 1)
            else:
                runs.append((version, 1))
        return tuple(runs)


@dataclass(frozen=True)
class _Piece:
    """Bytes for the harness; `last` closes the answer."""

    events: bytes
    last: bool = False


_Events = asyncio.Queue[_Piece]


class RunningCall:
    """One call from its prompt to its commit."""

    def __init__(
        self,
        context: CallContext,
        session: Session,
        dialect: Dialect,
        request: CallRequest,
        prompt: Prompt,
        call_id: str,
        role: str,
        meta: dict[str, Any],
    ) -> None:
        self._context = context
        self._session = session
        self._request = request
        self._prompt = prompt
        self._role = role
        self._meta = meta
        self._started = time.time()
        self.answer = Answer(
            call_id, request.model, int(self._started), len(prompt.token_ids), prompt.num_reused
        )
        self._dialect = dialect
        renderer = context.renderer
        self._decoder = TokenDecoder(renderer.tokens)
        self._parser = OutputParser(
            renderer.tool_format, request.tools, request.stop, prompt.opens_thinking
        )
        self._sampled = Sampled()
        self._sampling = _sampling(request, context)
        self._node: Node | None = None
        self._handed_over = False
        self._routes = self._route_recorder()

    # for the harness
    # --------------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; opens at once and pings while nothing comes."""
        writer = self._dialect.writer(self._request, self.answer)
        queue: _Events = asyncio.Queue()
        work = asyncio.create_task(self._pump(writer, queue))
        interval = self._context.config.proxy.ping_interval_s
        try:
            yield writer.start()
            while True:
                try:
                    data = (
                        queue.get_nowait()
                        if not queue.empty()
                        else await asyncio.wait_for(queue.get(), interval)
                    )
                except TimeoutError:
                    yield writer.ping()
                    continue
                if data.last:
                    self._handed_over = True
                    yield data.events
                    return
                yield data.events
        finally:
            await self._end(work)

    async def whole(self) -> dict[str, Any]:
        """The whole answer; raises what went wrong as BadRequest. Cancel it when the harness hangs
        up."""
        try:
            await self._produce(lambda parts: [self.answer.add(part) for part in parts])
        finally:
            if self._node is None:
                await self._abandon()
        return self._dialect.body(self._request, self.answer)

    async def _pump(self, writer: StreamWriter, queue: _Events) -> None:
        def write(parts: list[OutputEvent]) -> None:
            data = b"".join(writer.part(self.answer.add(part)) for part in parts)
            if data:
                queue.put_nowait(_Piece(data))

        try:
            await self._produce(write)
            queue.put_nowait(_Piece(writer.finish(), last=True))
        except BadRequest as error:
            queue.put_nowait(_Piece(writer.fail(error), last=True))
        except Exception:
            log.exception("call %s failed", self.answer.call_id)
            failure = BadRequest("the proxy failed; see its log", "internal", 500)
            queue.put_nowait(_Piece(writer.fail(failure), last=True))

    async def _end(self, work: asyncio.Task[None]) -> None:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        if self._node is None:
            await self._abandon()
        elif not self._handed_over:
            self._session.forest.forget_answer(self._node)
            await asyncio.wrap_future(
                self._context.store.set_call_state([self.answer.call_id], "undelivered")
            )

    async def _produce(self, take: Callable[[list[OutputEvent]], object]) -> None:
        """Hand over events as they come, then commit."""
        limit = self._context.config.proxy.call_timeout_s
        try:
            async with asyncio.timeout(limit):
                async for parts in self._parts():
                    take(parts)
        except TimeoutError as error:
            raise BadRequest(
                f"no engine finished the call within {limit:g} s", "internal", 529
            ) from error
        await self._commit("complete")

    # the work ------------------------------

    async def _parts(self) -> AsyncGenerator[list[OutputEvent], None]:
        request = GenerateRequest(
            self._prompt.token_ids,
            self._sampling,
            self._max_new_tokens(),
            self._session.execution_id,
            self._routes.start if self._routes is not None else None,
        )
        stream = self._context.router.generate(request)
        finish: str | None = None
        try:
            async for chunk in stream:
                self._sampled.add(chunk)
                if self._routes is not None and chunk.routed_experts is not None:
                    self._routes.add(chunk.prompt_length, chunk.routed_experts)
                finish = chunk.finish
                yield self._parser.feed(self._decoder.feed(chunk.token_ids))
                if self._parser.stopped_by is not None:
                    break
        except EngineRefused as error:
            raise self._refusal(error) from error
        except EngineError as error:
            raise BadRequest(
                f"no engine could finish the call: {error}", "internal", 529
            ) from error
        finally:
            await stream.aclose()
        yield self._parser.feed(self._decoder.finish()) + self._parser.finish()
        self._set_finish(finish)

    def _refusal(self, error: EngineRefused) -> BadRequest:
        """What an engine refuses for its length (its cache may hold less than the context) is an
        overflow."""
        if re.search(r"(?i)longer than|too long|exceed", str(error)):
            numbers = (len(self._prompt.token_ids), self._context.renderer.context_length)
            return BadRequest(
                f"the prompt does not fit the engine: {error}", "overflow", numbers=numbers
            )
        return BadRequest(f"the engine refused the call: {error}", "internal", 500)

    def _route_recorder(self) -> RouteRecorder | None:
        shape = self._context.renderer.routing_shape
        if not self._context.config.sampling.return_routed_experts or shape is None:
            return None
        new = [*self._session.forest.unsaved(self._prompt.parent)]
        return RouteRecorder(shape, new[0].start if new else self._prompt.parent.end)

    def _max_new_tokens(self) -> int:
        room = self._context.renderer.context_length - len(self._prompt.token_ids)
        wanted = self._request.max_tokens or self._context.config.sampling.max_new_tokens
        return min(room, wanted, self._context.config.sampling.max_new_tokens)

    def _set_finish(self, finish: str | None) -> None:
        answer = self.answer
        answer.num_output_tokens = len(self._sampled.token_ids)
        if self._parser.stopped_by is not None:
            answer.finish_reason, answer.stop_sequence = "stop_sequence", self._parser.stopped_by
        elif answer.tool_calls:
            answer.finish_reason = "tool_calls"
        else:
            answer.finish_reason = "length" if finish == "length" else "stop"

    async def _commit(self, state: CallState) -> None:
        prompt, forest, store = self._prompt, self._session.forest, self._context.store
        node = self._make_node()
        nodes = [*forest.unsaved(prompt.parent), node]
        if self._routes is not None:
            self._routes.assign(nodes)
        call = self._make_call(node, state)
        if state == "complete":
            forest.add_sampled(node)
        self._node = node
        try:
            await asyncio.wrap_future(store.add_call(call, nodes))
        except GyreError as error:
            forest.forget_answer(node)
            raise BadRequest(f"the call could not be recorded: {error}", "internal", 500) from error
        for stored in nodes:
            stored.persisted = True
        if state == "complete" and self._meta.get("retry_count", 0) > 0:
            await self._supersede(node)

    async def _supersede(self, node: Node) -> None:
        """The harness asked again: an earlier answer to the same prompt that it never built on must
        not train."""
        forest = self._session.forest
        older = forest.siblings_sampled_from(self._prompt.parent, node)
        for other in older:
            forest.forget_answer(other)
        if older:
            await asyncio.wrap_future(
                self._context.store.set_call_state([other.call_id for other in older], "superseded")
            )

    async def _abandon(self) -> None:
        """The harness hung up, or the call failed: keep what was sampled for the accounts only."""
        if self._sampled.token_ids:
            self._set_finish("length")
            with contextlib.suppress(BadRequest):
                await asyncio.shield(self._commit("undelivered"))

    def _make_node(self) -> Node:
        prompt, sampled = self._prompt, self._sampled
        tools = [(call.name, call.arguments) for call in self.answer.tool_calls]
        return Node(
            node_id=self._context.store.new_node_id(),
            parent=prompt.parent.node_id,
            key=answer_key(prompt.prefill + self.answer.text, tools),
            token_ids=np.concatenate([prompt.lead, np.asarray(sampled.token_ids, np.int32)]),
            num_context=len(prompt.lead),
            logprobs=np.asarray(sampled.logprobs, np.float32),
            versions=sampled.version_runs(),
            temperature=self._sampling["temperature"] or 1.0,
            call_id=self.answer.call_id,
            start=prompt.parent.end,
        )

    def _make_call(self, node: Node, state: CallState) -> Call:
        return Call(
            call_id=self.answer.call_id,
            execution_id=self._session.execution_id,
            attempt=self._session.attempt,
            node_id=node.node_id,
            dialect=self._request.dialect,
            role=self._role,
            state=state,
            finish_reason=self.answer.finish_reason,
            num_prompt_tokens=len(self._prompt.token_ids),
            num_reused_tokens=self._prompt.num_reused,
            num_output_tokens=len(self._sampled.token_ids),
            started_at=self._started,
            finished_at=time.time(),
            meta={**self._meta, "sampling": self._sampling},
        )


def _sampling(request: CallRequest, context: CallContext) -> dict[str, Any]:
    """SGLang's sampling parameters: the configured ones, or else the harness's."""
    config = context.config.sampling
    asked = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    sampling: dict[str, Any] = {
        "temperature": asked if config.temperature is None else config.temperature,
        "top_p": top_p if config.top_p is None else config.top_p,
        "stop_token_ids": [context.renderer.turn_end_id],
        "skip_special_tokens": False,
    }
    if config.top_p is None and request.top_k:
        sampling["top_k"] = request.top_k
    if request.stop:
        sampling["stop"] = list(request.stop)
    return sampling
