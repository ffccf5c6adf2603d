"""The HTTP face of the control plane: three dialects, bearer tokens, one tree per execution.

Bodies are read as raw JSON with a size limit; every error has the form of its dialect. Made by
`create_proxy_app`, served by the runtime on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import GyreError
from gyre_megatron.proxy.call import CallContext, RunningCall
from gyre_megatron.proxy.call_roles import PROFILES
from gyre_megatron.proxy.dialects import schemas
from gyre_megatron.proxy.dialects.anthropic import AnthropicMessages
from gyre_megatron.proxy.dialects.base import Answer, Dialect
from gyre_megatron.proxy.dialects.chat import ChatCompletions
from gyre_megatron.proxy.dialects.responses import Responses
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


class Proxy:
    """Turns requests into calls of the execution whose token they carry."""

    def __init__(
        self, store: TrajectoryStore, router: Router, renderer: Renderer, config: RolloutConfig
    ) -> None:
        self._context = CallContext(store, router, renderer, config)
        self._sessions = Sessions(store, config.proxy.session_cache_mib)
        self._profile = PROFILES[config.proxy.harness_profile]
        self._max_bytes = config.proxy.max_request_mib << 20
        self.num_calls = 0
        self.num_errors = 0

    async def serve(self, dialect: Dialect, http: Request) -> Response:
        """Answer one request of a harness."""
        try:
            execution_id, attempt = self._authenticate(http)
            request = dialect.parse(await self._read(http))
            self.num_calls += 1
            return await self._call(dialect, http, request, execution_id, attempt)
        except BadRequest as error:
            if error.kind == "overflow" and dialect.overflow_in_stream and request.stream:
                return _failed_stream(dialect, request, error)
            return self._refuse(dialect, error)
        except GyreError as error:
            log.exception("a request could not be served")
            return self._refuse(dialect, BadRequest(str(error), "internal", 400))
        except Exception:
            log.exception("a request failed")
            return self._refuse(
                dialect, BadRequest("the proxy failed; see its log", "internal", 500)
            )

    async def count_tokens(self, dialect: Dialect, http: Request) -> Response:
        """Tokens a request would be fed, without calling an engine."""
        try:
            execution_id, attempt = self._authenticate(http)
            request = dialect.parse(await self._read(http))
            with self._sessions.use(execution_id, attempt) as session:
                prompt = await self._context.renderer.extend_long(session.forest, units_of(request))
            return JSONResponse({"input_tokens": len(prompt.token_ids)})
        except BadRequest as error:
            return self._refuse(dialect, error)
        except GyreError as error:
            return self._refuse(dialect, BadRequest(str(error)))

    async def _call(
        self, dialect: Dialect, http: Request, request: CallRequest, execution_id: str, attempt: int
    ) -> Response:
        holder = self._sessions.use(execution_id, attempt)
        session = holder.__enter__()
        try:
            call = await self._prepare(dialect, http, request, session)
            if request.stream:
                return StreamingResponse(
                    _holding(holder, call.stream()), media_type="text/event-stream"
                )
            body = await _unless_disconnected(http, call.whole())
            response = Response(orjson.dumps(body), media_type="application/json")
        except BaseException:
            holder.__exit__(None, None, None)
            raise
        holder.__exit__(None, None, None)
        return response

    async def _prepare(
        self, dialect: Dialect, http: Request, request: CallRequest, session: Session
    ) -> RunningCall:
        prompt = await self._prompt(session, request)
        role = self._profile.role_of(request, http.headers)
        meta: dict[str, Any] = {
            "headers": {k: http.headers[k] for k in _KEPT_HEADERS if k in http.headers}
        }
        meta["asked"] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
        }
        meta["retry_count"] = _whole(http.headers.get("x-stainless-retry-count"))
        return RunningCall(
            self._context, session, dialect, request, prompt, secrets.token_hex(12), role, meta
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
        found = self._context.store.authenticate(_token(http.headers))
        if found is None:
            raise BadRequest("this token belongs to no running execution", "authentication", 401)
        return found

    async def _read(self, http: Request) -> dict[str, Any]:
        limit = self._max_bytes
        if http.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest(
                "compressed bodies are not read; send the body as it is", "invalid", 415
            )
        if _whole(http.headers.get("content-length")) > limit:
            raise BadRequest(f"the request is larger than {limit} bytes", "too_large", 413)
        pieces, size = [], 0
        async for piece in http.stream():
            size += len(piece)
            if size > limit:
                raise BadRequest(f"the request is larger than {limit} bytes", "too_large", 413)
            pieces.append(piece)
        try:
            body = orjson.loads(b"".join(pieces))
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return body

    def _refuse(self, dialect: Dialect, error: BadRequest) -> Response:
        self.num_errors += error.status >= 500 or error.kind == "internal"
        return JSONResponse(dialect.error(error), status_code=error.status)


def create_proxy_app(
    store: TrajectoryStore,
    router: Router,
    renderer: Renderer,
    config: RolloutConfig,
    model_name: str = "gyre",
) -> FastAPI:
    """The application that harnesses talk to."""
    app = FastAPI(title="Gyre proxy", docs_url=None, redoc_url=None)
    proxy = Proxy(store, router, renderer, config)
    app.state.proxy = proxy
    anthropic, chat, responses = AnthropicMessages(), ChatCompletions(), Responses()

    @app.post("/v1/messages", openapi_extra=schemas.ANTHROPIC)
    async def messages(http: Request) -> Response:
        return await proxy.serve(anthropic, http)

    @app.post("/v1/messages/count_tokens", openapi_extra=schemas.ANTHROPIC)
    async def count_tokens(http: Request) -> Response:
        return await proxy.count_tokens(anthropic, http)

    @app.post("/v1/chat/completions", openapi_extra=schemas.CHAT)
    @app.post("/chat/completions", include_in_schema=False)
    async def chat_completions(http: Request) -> Response:
        return await proxy.serve(chat, http)

    @app.post("/v1/responses", openapi_extra=schemas.RESPONSES)
    @app.post("/responses", include_in_schema=False)
    async def create_response(http: Request) -> Response:
        return await proxy.serve(responses, http)

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(model_name)], "has_more": False}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(name)

    @app.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def hello() -> dict[str, str]:
        return {"message": "hello"}

    return app


def _failed_stream(dialect: Dialect, request: CallRequest, error: BadRequest) -> Response:
    writer = dialect.writer(request, Answer(secrets.token_hex(12), request.model, int(time.time())))
    return Response(writer.start() + writer.fail(error), media_type="text/event-stream")


def _model(name: str) -> dict[str, Any]:
    created = int(time.time())
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    anthropic = {"type": "model", "display_name": name, "created_at": stamp}
    return {"id": name, "object": "model", "created": created, "owned_by": "gyre", **anthropic}


def _token(headers: Mapping[str, str]) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "")


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


async def _holding(holder: Any, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Keep the session in memory until the stream has ended."""
    try:
        async for data in stream:
            yield data
    finally:
        await stream.aclose()
        holder.__exit__(None, None, None)


async def _unless_disconnected(http: Request, work: Any) -> dict[str, Any]:
    """Run `work`; cancel it when the harness hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise BadRequest("the client hung up", "cancelled", 499)
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
