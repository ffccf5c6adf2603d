"""Workspaces: made before a harness runs, copied without letting anything escape when they are
scored."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre_megatron.errors import GyreError


class WorkspaceError(GyreError, OSError):
    """A workspace cannot be made or copied."""


@dataclass(frozen=True)
class Workspace:
    """Directories of one attempt: where the harness works, its HOME, its TMPDIR, and what was kept
    of its output."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def prompt_file(self) -> Path:
        return self.root / "prompt.txt"

    def create(self, seed: Path | None, prompt: str) -> None:
        """Make the directories, fresh, and copy `seed` into the working directory."""
        self.remove()
        for directory in (self.root, self.home, self.tmp):
            directory.mkdir(parents=True)
        if seed is not None and seed.is_dir():
            shutil.copytree(seed, self.work, symlinks=True)
        else:
            self.work.mkdir()
        self.prompt_file.write_text(prompt)

    def remove(self) -> None:
        """Delete everything, also what the harness made unreadable."""
        for directory, names, _ in os.walk(self.root, onerror=None):
            for name in names:
                if not (child := Path(directory, name)).is_symlink():
                    child.chmod(stat.S_IRWXU)
        if self.root.exists():
            shutil.rmtree(self.root)


def copy_contained(
    source: Path, target: Path, max_bytes: int = 2 << 30, max_entries: int = 200_000
) -> list[str]:
    """Copy regular files, directories and links that stay inside; nothing outside `source` is ever
    read.

    Returns:
        Relative paths that were left out: links that lead outside or nowhere, devices, sockets,
        pipes.

    Raises:
        WorkspaceError: the tree is larger than the limits.
    """
    root = source.resolve()
    left_out: list[str] = []
    num_bytes = num_entries = 0
    for directory, names, files in os.walk(root, followlinks=False):
        here = Path(directory)
        there = target / here.relative_to(root)
        there.mkdir(parents=True, exist_ok=True)
        for name in [*files, *(n for n in names if (here / n).is_symlink())]:
            num_entries += 1
            status = (here / name).lstat()
            num_bytes += status.st_size
            if num_bytes > max_bytes or num_entries > max_entries:
                raise WorkspaceError(
                    f"{source} is larger than {max_bytes} bytes or {max_entries} files; not copied"
                )
            if not _copy_entry(root, here / name, there / name, status.st_mode):
                left_out.append(str((here / name).relative_to(root)))
    return left_out


def _copy_entry(root: Path, source: Path, target: Path, mode: int) -> bool:
    if stat.S_ISLNK(mode):
        try:
            resolved = source.resolve()
        except (OSError, RuntimeError):  # a loop
            return False
        if not resolved.is_relative_to(root) or not resolved.exists():
            return False
        target.symlink_to(os.path.relpath(resolved, source.parent.resolve()))
        return True
    if not stat.S_ISREG(mode):
        return False
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as reader, open(target, "wb") as writer:
        shutil.copyfileobj(reader, writer)
    target.chmod(stat.S_IMODE(mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    return True
