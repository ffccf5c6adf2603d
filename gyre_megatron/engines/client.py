"""The only HTTP client of an SGLang server: `EngineClient` for the event loop, `EngineHttp` for
callers that block.

The router streams calls through the first; a cell's leader and its weight installer post SGLang's
other verbs through the second. Invariant: every failure of the engine or the connection comes out
as EngineError; what had arrived before it stays with the caller.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
import orjson

from gyre_megatron.config.rollout import RouterConfig
from gyre_megatron.engines.generate import GenerateRequest, StreamReader, TokenChunk, refusal
from gyre_megatron.errors import EngineError

_ABORT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0
_JSON_HEADERS = {"content-type": "application/json"}
_LOST = (aiohttp.ClientError, TimeoutError, OSError)

Result = TypeVar("Result")


class EngineClient:
    """One SGLang server, spoken to from an event loop.

    Args:
        url: The server's base URL.
        session: Connections, shared by the clients of a loop.
        config: Time limits of streams.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, config: RouterConfig) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.stall_timeout_s
        )

    async def stream(
        self, request: GenerateRequest, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Generate; the last chunk has `finish`.

        Raises:
            EngineRefused: the engine says the request itself is wrong.
            EngineError: the engine or the connection failed.
        """
        reader = StreamReader(self.url, len(request.input_ids))
        try:
            async with self._session.post(
                f"{self.url}/generate",
                data=request.to_json(request_id),
                headers=_JSON_HEADERS,
                timeout=self._stream_timeout,
            ) as response:
                if response.status != 200:
                    raise refusal(self.url, response.status, await response.text())
                async for data in response.content.iter_any():
                    for chunk in reader.feed(data):
                        yield chunk
                        if chunk.finish is not None:
                            return
        except _LOST as error:
            raise EngineError(
                f"engine {self.url} failed: {type(error).__name__}: {error}"
            ) from error
        raise EngineError(
            f"engine {self.url} ended a stream without a finish reason after {reader.num_tokens} "
            "tokens"
        )

    async def abort(self, request_id: str) -> None:
        """Ask the engine to cut a request short; its last tokens come through its stream.

        Raises:
            EngineError: the engine does not answer.
        """
        await self.post("/abort_request", {"rid": request_id}, _ABORT_TIMEOUT_S)

    async def post(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """POST a JSON body; see EngineHttp.post."""
        return await self._request("POST", path, body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET; see EngineHttp.get."""
        return await self._request("GET", path, None, timeout_s)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Any:
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=_JSON_HEADERS, timeout=timeout
            ) as response:
                answer = await response.read()
        except _LOST as error:
            raise EngineError(
                f"engine {self.url} did not answer {path} within {timeout_s:g} s: "
                f"{type(error).__name__}: {error}"
            ) from error
        if response.status >= 400:
            text = answer.decode(errors="replace")
            raise refusal(self.url, response.status, f"{path}: {text}")
        return orjson.loads(answer) if response.content_type == "application/json" else answer

    async def is_healthy(self) -> bool:
        """Whether the server's health check answers well; False while nothing listens yet."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except _LOST:
            return False


class EngineHttp:
    """One SGLang server, for threads that wait for the answer.

    A thin face of `EngineClient` on a loop in a thread of its own: connections stay open from call
    to call, and several threads may wait at once (a long /generate does not hold up a pause). The
    thread starts with the first call, so that a fork before it does no harm.

    Args:
        url: The server's base URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EngineClient | None = None
        self._close: weakref.finalize | None = None

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> Any:
        """POST a JSON body and wait.

        Args:
            path: SGLang's verb, for example /pause_generation.
            body: Its JSON object.
            timeout_s: Longest time until the whole answer is there.

        Returns:
            The answer: decoded where it is JSON, else its bytes.

        Raises:
            EngineError: the engine does not answer in time, or answers with an error.
        """
        return self._wait(self._open().post(path, body, timeout_s))

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET and wait.

        Returns:
            The answer: decoded where it is JSON, else its bytes.

        Raises:
            EngineRefused: the server does not know the path.
            EngineError: the engine does not answer in time, or answers with an error.
        """
        return self._wait(self._open().get(path, timeout_s))

    def is_healthy(self) -> bool:
        """Whether the server's health check answers well; False while nothing listens yet."""
        return self._wait(self._open().is_healthy())

    def close(self) -> None:
        """Close the connections and end the thread; safe to call twice."""
        if self._close is not None:
            self._close()
        self._client = None

    def _open(self) -> EngineClient:
        with self._starting:
            if self._client is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="engine-http", daemon=True).start()
                self._loop = loop
                self._client, session = self._wait(self._connect())
                # Also at interpreter exit: aiohttp complains about sessions that nobody closed.
                self._close = weakref.finalize(self, _close, loop, session)
            return self._client

    async def _connect(self) -> tuple[EngineClient, aiohttp.ClientSession]:
        session = aiohttp.ClientSession()  # binds to the loop it is made in
        return EngineClient(self.url, session, RouterConfig()), session

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        assert self._loop is not None  # _open has made it
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _close(loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> None:
    asyncio.run_coroutine_threadsafe(session.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
