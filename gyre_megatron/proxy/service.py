"""From a request to the call of the execution whose token it carries, whatever its dialect.

Made by `create_proxy_app`. Invariant: every failure is answered in the form of the dialect that
asked, and nothing of an execution is touched before its token is known.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import GyreError
from gyre_megatron.proxy.call import RunningCall
from gyre_megatron.proxy.call_roles import CallRoleProfile, call_role_of
from gyre_megatron.proxy.dialects.base import Answer, Dialect
from gyre_megatron.proxy.http_requests import read_body, token_of, unless_disconnected, whole_number
from gyre_megatron.proxy.recording import CallContext, IncomingCall
from gyre_megatron.proxy.sessions import Session, Sessions
from gyre_megatron.text.conversation import BadRequest, CallRequest, units_of
from gyre_megatron.text.renderer import Prompt, Renderer
from gyre_megatron.trajectory.store import TrajectoryStore

log = logging.getLogger(__name__)

_KEPT_HEADERS = (
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-request-class",
    "session-id",
)


class ProxyService:
    """Serves calls of running executions.

    Args:
        profile: Tells the role of a call.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        router: Router,
        renderer: Renderer,
        config: RolloutConfig,
        profile: CallRoleProfile,
    ) -> None:
        self._context = CallContext(store, router, renderer, config)
        self._sessions = Sessions(store, config.proxy.session_cache_mib)
        self._profile = profile
        self._max_bytes = config.proxy.max_request_mib << 20
        self.num_calls = 0
        self.num_errors = 0

    async def serve(self, dialect: Dialect, http: Request) -> Response:
        """Answer one request of a harness."""
        request: CallRequest | None = None
        try:
            execution_id, attempt = self._authenticate(http)
            request = dialect.parse(await read_body(http, self._max_bytes))
            self.num_calls += 1
            return await self._call(dialect, http, request, execution_id, attempt)
        except Exception as error:
            refusal = _as_refusal(error)
            told_in_stream = dialect.overflow_in_stream and refusal.kind == "overflow"
            if request is not None and request.stream and told_in_stream:
                return _failed_stream(dialect, request, refusal)
            return self.refuse(dialect, refusal)

    async def count_tokens(self, dialect: Dialect, http: Request) -> Response:
        """Tokens a request would be fed, without calling an engine."""
        try:
            execution_id, attempt = self._authenticate(http)
            request = dialect.parse(await read_body(http, self._max_bytes))
            with self._sessions.use(execution_id, attempt) as session:
                prompt = await self._context.renderer.extend_long(session.forest, units_of(request))
            return JSONResponse({"input_tokens": len(prompt.token_ids)})
        except Exception as error:
            return self.refuse(dialect, _as_refusal(error))

    def refuse(self, dialect: Dialect, error: BadRequest) -> Response:
        """An error in the dialect's form."""
        self.num_errors += error.status >= 500 or error.kind == "internal"
        return JSONResponse(dialect.error(error), status_code=error.status)

    async def _call(
        self, dialect: Dialect, http: Request, request: CallRequest, execution_id: str, attempt: int
    ) -> Response:
        with contextlib.ExitStack() as held:
            session = held.enter_context(self._sessions.use(execution_id, attempt))
            incoming = await self._incoming(dialect, http, request, session)
            call = RunningCall(self._context, incoming)
            if request.stream:
                # The stream outlives this function: it takes over what is held.
                stream = _holding(held.pop_all(), call.stream())
                return StreamingResponse(stream, media_type="text/event-stream")
            body = await unless_disconnected(http, call.whole())
            return Response(orjson.dumps(body), media_type="application/json")

    async def _incoming(
        self, dialect: Dialect, http: Request, request: CallRequest, session: Session
    ) -> IncomingCall:
        asked = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
        }
        kept = {name: http.headers[name] for name in _KEPT_HEADERS if name in http.headers}
        return IncomingCall(
            session,
            dialect,
            request,
            prompt=await self._prompt(session, request),
            call_id=secrets.token_hex(12),
            call_role=call_role_of(self._profile, request, http.headers),
            retry_count=whole_number(http.headers.get("x-stainless-retry-count")),
            meta={"headers": kept, "asked": asked},
        )

    async def _prompt(self, session: Session, request: CallRequest) -> Prompt:
        prompt = await self._context.renderer.extend_long(session.forest, units_of(request))
        limit = self._context.renderer.context_length
        if len(prompt.token_ids) >= limit:
            raise BadRequest(
                "the prompt does not fit the context",
                "overflow",
                numbers=(len(prompt.token_ids), limit),
            )
        return prompt

    def _authenticate(self, http: Request) -> tuple[str, int]:
        found = self._context.store.authenticate(token_of(http.headers))
        if found is None:
            raise BadRequest("this token belongs to no running execution", "authentication", 401)
        return found


def _as_refusal(error: Exception) -> BadRequest:
    """What a failure is to the harness; what is not the harness's own fault is logged."""
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, GyreError):
        log.error("a request could not be served", exc_info=error)
        return BadRequest(str(error), "internal", 400)
    log.error("a request failed", exc_info=error)
    return BadRequest("the proxy failed; see its log", "internal", 500)


def _failed_stream(dialect: Dialect, request: CallRequest, error: BadRequest) -> Response:
    writer = dialect.writer(request, Answer(secrets.token_hex(12), request.model, int(time.time())))
    return Response(writer.start() + writer.fail(error), media_type="text/event-stream")


async def _holding(
    held: contextlib.ExitStack, stream: AsyncGenerator[bytes, Any]
) -> AsyncGenerator[bytes, None]:
    """Keep the session in memory until the stream has ended."""
    with held:
        async with contextlib.aclosing(stream):
            async for data in stream:
                yield data
