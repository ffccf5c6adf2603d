"""HTTP routes of the control plane beside the proxy: cells, status, metrics.

Cells show the run's control token; harnesses have only their execution's bearer token and are
refused here.
"""

from __future__ import annotations

import hmac

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gyre_megatron import metrics
from gyre_megatron.errors import CellError
from gyre_megatron.runtime.control_client import CONTROL_TOKEN_HEADER
from gyre_megatron.runtime.control_plane import ControlPlane
from gyre_megatron.runtime.protocol import Register, Report


def add_cell_routes(app: FastAPI, control: ControlPlane, token: str) -> None:
    """Add /cells/{cell}/{register,next,report,fail}, /status and /metrics to the proxy's
    application."""

    def check(request: Request) -> None:
        if not hmac.compare_digest(
            request.headers.get(CONTROL_TOKEN_HEADER, "").encode(), token.encode()
        ):
            raise HTTPException(401, "this route is for cells and needs the run's control token")

    @app.exception_handler(CellError)
    async def cell_error(_: Request, error: CellError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=409)

    @app.post("/cells/{cell}/register")
    async def register(cell: int, request: Request) -> Response:
        check(request)
        control.parts.cells.register(
            cell, msgspec.msgpack.decode(await request.body(), type=Register)
        )
        return Response(status_code=204)

    @app.post("/cells/{cell}/next")
    async def next_order(cell: int, request: Request) -> Response:
        check(request)
        return Response(
            await control.parts.cells.next_order(cell), media_type="application/msgpack"
        )

    @app.post("/cells/{cell}/report")
    async def report(cell: int, request: Request) -> Response:
        check(request)
        control.parts.cells.report(cell, msgspec.msgpack.decode(await request.body(), type=Report))
        return Response(status_code=204)

    @app.post("/cells/{cell}/fail")
    async def fail(cell: int, request: Request) -> Response:
        check(request)
        control.parts.cells.fail(f"cell {cell}: {(await request.body()).decode(errors='replace')}")
        return Response(status_code=204)

    @app.get("/status")
    async def status() -> JSONResponse:
        return JSONResponse(control.status())

    @app.get("/metrics")
    async def prometheus() -> Response:
        metrics.running.set(control.executions.num_running)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
