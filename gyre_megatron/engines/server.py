"""Life of one cell's SGLang server: start, wait, release and resume its memory, stop.

Owned by the leader of a cell. The server is started once and never restarted by a role change. It
lives in its own process group and dies with the process that started it.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_megatron.config.cluster import EngineConfig
from gyre_megatron.engines.client import EngineHttp
from gyre_megatron.engines.loader import LOADER
from gyre_megatron.errors import EngineError
from gyre_megatron.processes import child_environment, group_members, send

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 25
STOP_TIMEOUT_S = 15.0
TORCHRUN_VARIABLES = (
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Prefixes of what torchrun sets for its ranks; with them the engine would wait for the job's own
store."""


@dataclass(frozen=True)
class ServerSpec:
    """What a server serves and where.

    Attributes:
        checkpoint: directory of a Hugging Face checkpoint.
        tp: tensor-parallel size.
        device: "cuda" or "cpu".
        host, port: address it binds; port 0 takes a free one.
        log_file: its output.
        weight_version: number that the checkpoint's weights go by.
        base_gpu_id: first device of the cell on this node; ignored on a CPU.
    """

    checkpoint: Path
    tp: int
    device: str
    host: str
    port: int
    log_file: Path
    weight_version: int = 0
    base_gpu_id: int = 0


class SglangServer:
    """A real `sglang.launch_server` process."""

    def __init__(self, spec: ServerSpec, config: EngineConfig) -> None:
        self.spec = spec
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._take_port(spec.port or _free_port(spec.host))

    def _take_port(self, port: int) -> None:
        self.port = port
        self.url = f"http://{self.spec.host}:{port}"
        self.http = EngineHttp(self.url)

    def start(self) -> None:
        """Start the process; `wait_until_ready` tells when it serves.

        Raises:
            EngineError: the port is taken.
        """
        _refuse_taken_port(self.spec.host, self.port)
        self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        environment = child_environment() | {"HF_HUB_OFFLINE": "1"}
        if self.spec.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(self.config.num_threads)
            if self.spec.tp > 1:
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                    str(i) for i in range(self.spec.tp)
                )
        environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(TORCHRUN_VARIABLES)
        }
        with self.spec.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """The command line, in SGLang's own argument names."""
        spec = self.spec
        config = self.config
        values: dict[str, object] = {
            "--model-path": spec.checkpoint,
            "--device": spec.device,
            "--dtype": config.dtype,
            "--host": spec.host,
            "--port": self.port,
            "--tp-size": spec.tp,
            "--mem-fraction-static": config.mem_fraction_static,
            "--weight-version": self.spec.weight_version,
            "--log-level": "warning",
            "--custom-weight-loader": LOADER,
        }
        if config.ep > 1:
            values["--ep-size"] = config.ep
        bounds = {  # a run fills these in (config.limits); None leaves the choice to SGLang
            "--context-length": config.context_length,
            "--max-running-requests": config.max_running_requests,
            "--max-total-tokens": config.max_total_tokens,
        }
        values |= {flag: bound for flag, bound in bounds.items() if bound is not None}
        flags = ["--sleep-on-idle", "--skip-server-warmup", "--incremental-streaming-output"]
        if spec.device == "cuda":
            flags.append("--enable-memory-saver")  # or memory cannot be released to the trainer
            values["--base-gpu-id"] = spec.base_gpu_id
        else:
            flags.append("--disable-cuda-graph")
            values |= {
                "--attention-backend": "torch_native",
                "--sampling-backend": "pytorch",
                "--grammar-backend": "none",
            }
        pairs = [str(word) for pair in values.items() for word in pair]
        module = "gyre_megatron.cpu.sglang.launch"
        return [sys.executable, "-m", module, *pairs, *flags, *config.extra_args]

    def wait_until_ready(self) -> None:
        """Block until the health check answers.

        A port that was free when the server started may be taken when it listens; where any port
        will do, it is started again on another. Read `url` after this.

        Raises:
            EngineError: the process ended or the time limit passed; the message holds its last log
            lines.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        while time.monotonic() < deadline:
            if self.spec.port == 0 and self._lost_its_port():
                self.stop()
                self._take_port(_free_port(self.spec.host))
                self.start()
            self.check_alive()
            if self.http.is_healthy():
                self._freeze_garbage_collector()
                return
            time.sleep(0.1)
        raise EngineError(
            f"the SGLang server at {self.url} was not ready after "
            f"engine.start_timeout_s={self.config.start_timeout_s}"
            f" s; its last log lines:\n{self.log_tail()}"
        )

    def _freeze_garbage_collector(self) -> None:
        """Exempt what start-up allocated from collection: each release or flush collects, over
        millions of objects."""
        self.post("/freeze_gc")

    def check_alive(self) -> None:
        """Raise EngineError with the last log lines if the process ended."""
        if self._process is None:
            raise EngineError("the SGLang server was not started")
        code = self._process.poll()
        if code is not None:
            raise EngineError(
                f"the SGLang server at {self.url} ended with exit code {code}; its last log lines "
                f"({self.spec.log_file}):\n{self.log_tail()}"
            )

    def _lost_its_port(self) -> bool:
        """Whether the process ended because somebody else listens on its port."""
        ended = self._process is not None and self._process.poll() is not None
        return ended and _is_taken(self.spec.host, self.port)

    def log_tail(self) -> str:
        lines = self.spec.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def offload(self) -> None:
        """Give the engine's device memory (KV cache, weights) to the trainer; nothing may be
        running on it."""
        self.post("/release_memory_occupation", {})

    def onload(self) -> bool:
        """Take the memory back; the weights are installed next.

        SGLang's scheduler dies of a resume that fails, and of one that is asked for twice. So a
        server that does not resume is replaced by a new one at the same address, once.

        Returns:
            Whether it was replaced. A new server has the weights of its checkpoint, and who
            publishes into it must attach afresh.

        Raises:
            EngineError: the new server does not start either.
        """
        try:
            self.post("/resume_memory_occupation", {})
            return False
        except EngineError as error:
            logger.warning("the server at %s is replaced: %s", self.url, error)
        self.stop()
        self.start()
        self.wait_until_ready()
        return True

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One call of the engine's native `/generate`, without streaming."""
        return self.post("/generate", body)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> Any:
        """POST to the server; see EngineHttp.post.

        Raises:
            EngineError: it does not answer, or answers with an error; where its process has ended,
            the message holds its last log lines.
        """
        try:
            return self.http.post(path, body, timeout_s)
        except EngineError:
            self.check_alive()
            raise

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET from the server; see EngineHttp.get."""
        return self.http.get(path, timeout_s)

    def stop(self) -> None:
        """End the server and everything it started; safe to call twice."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            send(group_members(self._process.pid), number)
            try:
                self._process.wait(STOP_TIMEOUT_S if number == signal.SIGTERM else None)
                break
            except subprocess.TimeoutExpired:
                continue
        # Workers may outlive their parent.
        send(group_members(self._process.pid), signal.SIGKILL)
        self._process = None
        self.http.close()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _refuse_taken_port(host: str, port: int) -> None:
    if _is_taken(host, port):
        raise EngineError(
            f"port {port} on {host} is in use; stop what listens there or set another"
        )
