"""A port that somebody takes between the start of a server and its listening."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from gyre_megatron.config.cluster import EngineConfig
from gyre_megatron.engines.server import ServerSpec, SglangServer
from gyre_megatron.errors import EngineError

SLOW = """
import http.server, sys, time
time.sleep(1)  # as SGLang loads its model first
class Face(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    do_POST = do_GET
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Face).serve_forever()
"""


class SlowServer(SglangServer):
    """A process that binds its port a second after it was started."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", SLOW, str(self.port)]


def _server(folder: Path, port: int = 0) -> SlowServer:
    spec = ServerSpec(folder, 1, "cuda", "127.0.0.1", port, folder / "log")
    return SlowServer(spec, EngineConfig(start_timeout_s=30))


def test_any_other_port_is_taken_instead(tmp_path):
    server = _server(tmp_path)
    lost = server.port
    server.start()
    try:
        with socket.socket() as thief:
            thief.bind(("127.0.0.1", lost))
            thief.listen()
            server.wait_until_ready()
        assert server.port != lost and server.url == f"http://127.0.0.1:{server.port}"
        assert server.http.is_healthy()
    finally:
        server.stop()


def test_a_port_that_was_asked_for_is_not_exchanged(tmp_path):
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        port = thief.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is in use"):
            _server(tmp_path, port).start()
