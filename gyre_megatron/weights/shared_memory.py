"""Files in memory that several processes map, and directories of them that live as long as their
owner.

Ownership is a lock that the owner's process holds on a file in the directory. The kernel releases
it when the process ends, however it ends, and it means the same in every pid namespace that shares
the memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

import torch

from gyre_megatron.errors import TransferError

_OWNER = "owner"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""


class OwnedDirectory:
    """A directory in shared memory, removed by `close`, at the owner's exit, or by the next owner's
    `sweep` after the owner was killed."""

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Locked before it gets its name: a sweep that comes by never finds it unlocked.
        unnamed = self.path / f"{_OWNER}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _OWNER)
        self._remove = weakref.finalize(self, _remove, self.path, self._lock)

    def close(self) -> None:
        """Remove it and all that is in it; safe to call twice."""
        self._remove()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def is_owned(directory: Path) -> bool:
    """Whether the process that made an `OwnedDirectory` still holds it."""
    try:
        with (directory / _OWNER).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def sweep(parent: Path, prefix: str) -> None:
    """Remove what owners that were killed left behind."""
    for left in parent.glob(f"{prefix}*"):
        if (left / _OWNER).exists() and not is_owned(left):
            shutil.rmtree(left, ignore_errors=True)


def host_identity() -> str:
    """The same for all processes of one running host, whatever namespaces they are in."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def memory_identity(directory: Path) -> str:
    """The same for two processes exactly if they see the same files in `directory`.

    Raises:
        TransferError: there is no such directory.
    """
    try:
        status = directory.stat()
    except OSError as error:
        raise TransferError(
            f"weights.shared_memory_dir: {directory} cannot be used ({error}); name a directory in "
            "memory, such as /dev/shm"
        ) from None
    return f"{host_identity()}:{status.st_dev}:{status.st_ino}"


def reserve_file(descriptor: int, size: int) -> None:
    """Take the memory of a file now: a sparse one would fail with a bus error in the middle of a
    swap.

    Raises:
        OSError: the file system is full.
    """
    os.posix_fallocate(descriptor, 0, size)


def map_file(path: Path, size: int) -> torch.Tensor:
    """A uint8 tensor over the first `size` bytes of a shared file.

    Where CUDA exists it is page-locked for its devices as long as the returned object lives (its
    owner keeps it beside any views).

    Raises:
        TransferError: the device refuses to lock the pages.
    """
    tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(tensor.data_ptr(), size, _PORTABLE_AND_MAPPED)
        if int(code):
            raise TransferError(
                f"page-locking {size} bytes of {path} failed with CUDA error {int(code)}; raise "
                "memlock limits"
            )
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
