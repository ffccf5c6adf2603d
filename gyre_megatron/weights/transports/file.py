"""Buckets as safetensors files in a directory that all processes see: no network, any speed, also
for cold starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.rendezvous import WaitError
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport

_WINDOW = 2
_POLL_S = 0.002


class FileTransport(Transport):
    """Writes at most two buckets ahead of each reader; a bucket's file is removed once it was
    read."""

    def __init__(
        self,
        kv_store: dist.Store,
        process: int,
        num_processes: int,
        directory: str | Path,
        name: str = "gyre/weights/file",
        timeout_s: float = 60.0,
        staging_bytes: int = 128 << 20,
    ) -> None:
        super().__init__(kv_store, process, num_processes, name, timeout_s, staging_bytes)
        self._root = Path(directory)
        self.folder = self._root

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes // (_WINDOW + 1) // 4096 * 4096

    def connect_streams(self) -> None:
        # A folder nobody has used: what a killed run left must not pass for this swap's buckets.
        mine = f"swap{self.swap}-{secrets.token_hex(4)}".encode()
        names = self.rendezvous.exchange("choosing a folder", payload=mine)
        self.folder = self._root / names[0].decode()
        self.folder.mkdir(parents=True, exist_ok=True)

    def finish(self, failure: BaseException | None) -> None:
        folder = self.folder
        try:
            super().finish(failure)
        finally:
            if self.process == 0 and folder != self._root:
                shutil.rmtree(folder, ignore_errors=True)

    def outbox(self, peer: int) -> Outbox:
        return _FileOutbox(self, peer)

    def inbox(self, peer: int, sizes: Sequence[int]) -> Inbox:
        return _FileInbox(self, peer)

    def break_off(self) -> None:
        super().break_off()
        with contextlib.suppress(FileNotFoundError):  # the swap is over and its folder gone
            (self.folder / "cancelled").touch()

    def wait(self, reached, what: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not reached():
            if self._broken or (self.folder / "cancelled").exists():
                raise WaitError(f"{what} was cancelled")
            if time.monotonic() > deadline:
                raise WaitError(f"{what} took longer than {self.timeout_s:g} s")
            time.sleep(_POLL_S)


class _FileOutbox(Outbox):
    def __init__(self, transport: FileTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._count = 0
        self._pending: deque[Path] = deque()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def slot(self, nbytes: int) -> torch.Tensor:
        if len(self._pending) == _WINDOW:
            oldest = self._pending.popleft()
            self._transport.wait(
                lambda: not oldest.exists(),
                f"waiting for process {self._peer} to read {oldest.name}",
            )
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer

    def post(self) -> None:
        path = _path(self._transport, self._transport.process, self._peer, self._count)
        save_file({"bucket": self._buffer}, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
        self._transport.account(self._buffer.numel())
        self._transport.account(-self._buffer.numel())
        self._pending.append(path)
        self._count += 1

    def flush(self) -> None:
        """The files stay until they are read."""


class _FileInbox(Inbox):
    def __init__(self, transport: FileTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._count = 0

    def slot(self, nbytes: int) -> torch.Tensor:
        path = _path(self._transport, self._peer, self._transport.process, self._count)
        self._transport.wait(path.exists, f"waiting for {path.name}")
        bucket = load_file(path)["bucket"]
        if bucket.numel() != nbytes:
            raise TransferError(f"{path} holds {bucket.numel()} bytes, {nbytes} were expected")
        return bucket

    def release(self) -> None:
        _path(self._transport, self._peer, self._transport.process, self._count).unlink()
        self._count += 1

    def close(self) -> None:
        """Nothing is held."""


def _path(transport: FileTransport, sender: int, receiver: int, number: int) -> Path:
    return transport.folder / f"{sender}-{receiver}-{number:06d}.safetensors"
