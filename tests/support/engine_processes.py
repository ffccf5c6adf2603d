"""Scripted engines as processes of their own, so that a test can kill one with signal 9 and bring
it back."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class EngineProcess:
    """One engine on a fixed port."""

    def __init__(self, version: int, token_delay_s: float) -> None:
        self.version = version
        self._delay = token_delay_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, without waiting until it answers."""
        command = [sys.executable, "-m", "tests.support.scripted_engine", "--port", str(self.port)]
        options = ["--version", str(self.version), "--token-delay-s", str(self._delay)]
        self._process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL)

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Wait until it accepts connections."""
        deadline = time.monotonic() + timeout_s
        while True:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no engine on port {self.port}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Signal 9, as a machine that loses power."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
