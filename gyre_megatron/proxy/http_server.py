"""Serving an application inside a running event loop, on a socket that is bound beforehand.

Used by the runtime and by `standalone`. Invariant: signals stay with the process that serves; the
server ends with its block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from gyre_megatron.errors import ConfigError

_BACKLOG = 1024
# Longer than any harness thinks between two calls, so that connections are kept.
_KEEP_ALIVE_S = 600


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, key: str) -> socket.socket:
    """A bound socket.

    Args:
        host: Address to bind.
        port: 0 takes a free one.
        key: What sets the port, for the error message.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); set {key} to a free port, or to 0 "
            "for any"
        ) from None
    return listener


@contextlib.asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on an open socket while the block runs."""
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=_KEEP_ALIVE_S
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        server.force_exit = True  # streams of harnesses that nobody waits for any more
        await task
