"""The HTTP face that harnesses call: the configured dialects, each under its own paths.

Made by `create_proxy_app`, served by the runtime or by `standalone` on 127.0.0.1. Invariant: every
error has the form of the dialect whose path was asked, and /openapi.json states what is enforced.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.proxy.dialects.base import Dialect
from gyre_megatron.proxy.extensions import load_extensions
from gyre_megatron.proxy.service import ProxyService
from gyre_megatron.text.conversation import BadRequest
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore

_ANSWERS = {
    "200": {"description": "The answer, whole or as server-sent events."},
    "400": {"description": "The request cannot be served; the message says why."},
    "401": {"description": "The token belongs to no running execution."},
    "413": {"description": "The body is too large."},
    "415": {"description": "The body is compressed."},
    "529": {"description": "No engine could finish the call."},
}
_REFERENCE = "#/components/schemas/{name}"


def create_proxy_app(
    store: TrajectoryStore,
    router: Router,
    renderer: Renderer,
    config: RolloutConfig,
    model_name: str = "gyre",
) -> FastAPI:
    """The application that harnesses talk to.

    Args:
        store: Where executions, their tokens and their calls are.
        router: Engines that serve.
        renderer: Chat template and tokenizer of the model.
        config: Dialects, call-role profile, sampling and limits.
        model_name: What /v1/models lists; requests may name any model.

    Raises:
        ConfigError: a dialect or the profile cannot be loaded.
    """
    extensions = load_extensions(config.proxy)
    service = ProxyService(store, router, renderer, config, extensions.call_role_profile)
    app = FastAPI(title="Gyre proxy", docs_url=None, redoc_url=None)
    app.state.proxy = service
    for dialect in extensions.dialects:
        _add_dialect(app, service, dialect)
    _add_models(app, model_name)
    _publish_schemas(app, extensions.dialects)
    _answer_lost_requests(app, service, extensions.dialects)
    return app


def _add_dialect(app: FastAPI, service: ProxyService, dialect: Dialect) -> None:
    async def serve(http: Request) -> Response:
        return await service.serve(dialect, http)

    async def count_tokens(http: Request) -> Response:
        return await service.count_tokens(dialect, http)

    _add_paths(app, dialect, dialect.paths, f"{dialect.name}_create", serve)
    _add_paths(app, dialect, dialect.count_paths, f"{dialect.name}_count_tokens", count_tokens)


def _add_paths(
    app: FastAPI,
    dialect: Dialect,
    paths: Sequence[str],
    name: str,
    endpoint: Callable[[Request], Awaitable[Response]],
) -> None:
    schema: dict[str, Any] = {"type": "object"}
    if dialect.body_type is not None:
        schema = {"$ref": _REFERENCE.format(name=dialect.body_type.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    for index, path in enumerate(paths):
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            operation_id=name,
            include_in_schema=index == 0,  # the others are aliases
            openapi_extra={"requestBody": body, "responses": _ANSWERS},
        )


def _add_models(app: FastAPI, model_name: str) -> None:
    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(model_name)], "has_more": False}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(name)

    # Claude Code asks these before its first call.
    @app.api_route("/api/hello", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def hello() -> dict[str, str]:
        return {"message": "hello"}


def _publish_schemas(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Put the structs that bodies are decoded into beside what FastAPI knows of the routes."""
    types = [dialect.body_type for dialect in dialects if dialect.body_type is not None]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending it


def _answer_lost_requests(app: FastAPI, service: ProxyService, dialects: Sequence[Dialect]) -> None:
    """Say 404 and 405 in the form that the client of such a path can read."""

    async def answer(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = http.url.path
        dialect = next((d for d in dialects if path.startswith(d.paths)), None)
        if dialect is None and path.startswith("/v1/") and dialects:
            dialect = dialects[0]
            if "anthropic-version" not in http.headers:
                dialect = next((d for d in dialects if d.name == "chat"), dialects[0])
        if dialect is None:
            return await http_exception_handler(http, error)
        served = sorted({path for d in dialects for path in (*d.paths, *d.count_paths)})
        message = f"{http.method} {path} is not served; POST to one of {', '.join(served)}"
        return service.refuse(dialect, BadRequest(message, "not_found", error.status_code))

    app.add_exception_handler(HTTPException, answer)


def _model(name: str) -> dict[str, Any]:
    created = int(time.time())
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    anthropic = {"type": "model", "display_name": name, "created_at": stamp}
    return {"id": name, "object": "model", "created": created, "owned_by": "gyre", **anthropic}
