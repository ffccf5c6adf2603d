"""The blocking face of the engine client: a real HTTP server answers, slowly, wrongly or not at
all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from gyre_megatron.engines.client import EngineHttp
from gyre_megatron.engines.generate import EngineRefused
from gyre_megatron.errors import EngineError


class Server:
    """A few of SGLang's verbs on a loop in another thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict]] = []
        self.connections: set[object] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", lambda _: web.Response())
        app.router.add_post("/{verb}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        text = await request.text()
        self.seen.append((verb, text))
        self.connections.add(request.transport)
        if verb == "slow":
            await asyncio.sleep(1.0)
        if verb == "wrong":
            return web.json_response({"error": {"message": "already open"}}, status=400)
        if verb == "broken":
            return web.Response(status=500, text="died")
        if verb == "text":
            return web.Response(text="done")
        return web.json_response({"verb": verb})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_answers_come_decoded_over_one_connection(server: Server) -> None:
    http = EngineHttp(server.url + "/")
    assert http.is_healthy()
    assert http.post("/pause_generation", {"mode": "retract"}) == {"verb": "pause_generation"}
    assert http.post("/text") == b"done"
    assert server.seen == [("pause_generation", '{"mode":"retract"}'), ("text", "")]
    assert len(server.connections) == 1
    http.close()
    http.close()
    assert http.post("/again") == {"verb": "again"}, "a closed client opens again"
    http.close()


def test_failures_are_engine_errors_with_the_answer(server: Server) -> None:
    http = EngineHttp(server.url)
    with pytest.raises(EngineRefused, match=r"400: /wrong: .*already open"):
        http.post("/wrong", {})
    with pytest.raises(EngineError, match="500: /broken: died") as caught:
        http.post("/broken", {})
    assert not isinstance(caught.value, EngineRefused)
    with pytest.raises(EngineError, match=r"did not answer /slow within 0\.2 s"):
        http.post("/slow", {}, timeout_s=0.2)
    http.close()
    nobody = EngineHttp("http://127.0.0.1:9")
    assert not nobody.is_healthy()
    with pytest.raises(EngineError, match="did not answer /flush_cache"):
        nobody.post("/flush_cache")
    nobody.close()


def test_a_slow_call_holds_up_no_other(server: Server) -> None:
    http = EngineHttp(server.url)
    http.is_healthy()
    slow = threading.Thread(target=http.post, args=("/slow", {}))
    started = time.monotonic()
    slow.start()
    while not server.seen:
        time.sleep(0.01)
    http.post("/pause_generation", {})
    assert time.monotonic() - started < 0.9 and slow.is_alive()
    slow.join()
    http.close()


def test_a_program_that_forgets_to_close_ends_quietly(server: Server) -> None:
    program = (
        "from gyre_megatron.engines.client import EngineHttp\n"
        f"print(EngineHttp({server.url!r}).post('/hello'))\n"
        f"kept = EngineHttp({server.url!r})\nkept.post('/hello')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "{'verb': 'hello'}\n", "")
