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
from dataclasses import dataclass
from typing import Any

from gyre_megatron.engines.generate import EngineRefused, GenerateRequest
from gyre_megatron.errors import EngineError
from gyre_megatron.proxy.dialects.base import Answer, StreamWriter
from gyre_megatron.proxy.recording import CallContext, CallRecorder, IncomingCall
from gyre_megatron.text.conversation import BadRequest, CallRequest
from gyre_megatron.text.output_parser import OutputEvent, OutputParser
from gyre_megatron.text.token_text import TokenDecoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Outgoing:
    """Bytes for the harness; `last` closes the answer."""

    data: bytes
    last: bool = False


class RunningCall:
    """One call from its prompt to its commit."""

    def __init__(self, context: CallContext, call: IncomingCall) -> None:
        self._context = context
        self._call = call
        request = call.request
        prompt = call.prompt
        self.answer = Answer(
            call.call_id,
            request.model,
            int(time.time()),
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=prompt.num_reused,
        )
        renderer = context.renderer
        self._decoder = TokenDecoder(renderer.tokens)
        self._parser = OutputParser(
            renderer.tool_format, request.tools, request.stop, prompt.opens_thinking
        )
        self._sampling = sampling_params(request, context)
        self._recorder = CallRecorder(context, call, self.answer, self._sampling)
        self._handed_over = False

    # for the harness ------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; opens at once and pings while nothing comes."""
        writer = self._call.dialect.writer(self._call.request, self.answer)
        queue: asyncio.Queue[_Outgoing] = asyncio.Queue()
        work = asyncio.create_task(self._pump(writer, queue))
        interval = self._context.config.proxy.ping_interval_s
        try:
            yield writer.start()
            while True:
                outgoing = await _next(queue, interval)
                if outgoing is None:
                    yield writer.ping()
                    continue
                # Set before the bytes leave: a harness that has read the end may be gone when this
                # generator would run on.
                self._handed_over = outgoing.last
                yield outgoing.data
                if outgoing.last:
                    return
        finally:
            await self._end(work)

    async def whole(self) -> dict[str, Any]:
        """The whole answer; raises what went wrong as BadRequest. Cancel it when the harness hangs
        up."""
        try:
            await self._produce(lambda parts: [self.answer.add(part) for part in parts])
        finally:
            if not self._recorder.committed:
                await self._abandon()
        return self._call.dialect.body(self._call.request, self.answer)

    async def _pump(self, writer: StreamWriter, queue: asyncio.Queue[_Outgoing]) -> None:
        def write(parts: list[OutputEvent]) -> None:
            data = b"".join(writer.part(self.answer.add(part)) for part in parts)
            if data:
                queue.put_nowait(_Outgoing(data))

        try:
            await self._produce(write)
            queue.put_nowait(_Outgoing(writer.finish(), last=True))
        except BadRequest as error:
            queue.put_nowait(_Outgoing(writer.fail(error), last=True))
        except Exception:
            log.exception("call %s failed", self.answer.call_id)
            failure = BadRequest("the proxy failed; see its log", "internal", 500)
            queue.put_nowait(_Outgoing(writer.fail(failure), last=True))

    async def _end(self, work: asyncio.Task[None]) -> None:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        if not self._recorder.committed:
            await self._abandon()
        elif not self._handed_over:
            await self._recorder.withdraw()

    async def _abandon(self) -> None:
        self._set_finish("length")
        await self._recorder.abandon()

    # the work ------------------------------

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
        await self._recorder.commit("complete")

    async def _parts(self) -> AsyncGenerator[list[OutputEvent], None]:
        request = GenerateRequest(
            self._call.prompt.token_ids,
            self._sampling,
            self._max_new_tokens(),
            affinity=self._call.session.execution_id,
            routed_start=self._recorder.routed_start,
        )
        stream = self._context.router.generate(request)
        finish: str | None = None
        try:
            async for chunk in stream:
                self._recorder.add(chunk)
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
            numbers = (len(self._call.prompt.token_ids), self._context.renderer.context_length)
            return BadRequest(
                f"the prompt does not fit the engine: {error}", "overflow", numbers=numbers
            )
        return BadRequest(f"the engine refused the call: {error}", "internal", 500)

    def _max_new_tokens(self) -> int:
        """What the harness asks for, cut to the run's cap and to what the context leaves: an
        engine would refuse the call otherwise, and harnesses ask for far more than they use."""
        room = self._context.renderer.context_length - len(self._call.prompt.token_ids)
        cap = self._context.config.sampling.max_new_tokens or room
        return min(room, cap, self._call.request.max_tokens or room)

    def _set_finish(self, finish: str | None) -> None:
        answer = self.answer
        answer.num_output_tokens = len(self._recorder.sampled.token_ids)
        if self._parser.stopped_by is not None:
            answer.finish_reason = "stop_sequence"
            answer.stop_sequence = self._parser.stopped_by
        elif answer.tool_calls:
            answer.finish_reason = "tool_calls"
        else:
            answer.finish_reason = "length" if finish == "length" else "stop"


async def _next(queue: asyncio.Queue[_Outgoing], patience_s: float) -> _Outgoing | None:
    """What comes next, or None if nothing does for a while."""
    if not queue.empty():  # spares a timer for each of the many tokens that are there already
        return queue.get_nowait()
    try:
        return await asyncio.wait_for(queue.get(), patience_s)
    except TimeoutError:
        return None


def sampling_params(request: CallRequest, context: CallContext) -> dict[str, Any]:
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
