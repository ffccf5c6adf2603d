"""Reading HTTP requests of clients that nobody vouches for: whose they are, how much is read, when
they hung up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request

from gyre_megatron.text.conversation import BadRequest

Result = TypeVar("Result")


def token_of(headers: Mapping[str, str]) -> str:
    """The bearer token, or the key in Anthropic's header; empty if there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "")


def whole_number(text: str | None) -> int:
    """A header that counts; 0 where it is absent or says something else."""
    return int(text) if text and text.isascii() and text.isdigit() else 0


async def read_body(http: Request, max_bytes: int) -> bytes:
    """The body, up to a limit.

    Raises:
        BadRequest: it is larger, or compressed (a small body may then unpack to a huge one).
    """
    if http.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("compressed bodies are not read; send the body as it is", "invalid", 415)
    too_large = BadRequest(f"the request is larger than {max_bytes} bytes", "too_large", 413)
    if whole_number(http.headers.get("content-length")) > max_bytes:
        raise too_large
    received: list[bytes] = []
    size = 0
    async for data in http.stream():
        size += len(data)
        if size > max_bytes:  # a chunked body announces no length
            raise too_large
        received.append(data)
    return b"".join(received)


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; cancel it when the client hangs up.

    Raises:
        BadRequest: the client hung up; nobody will read this.
    """
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
