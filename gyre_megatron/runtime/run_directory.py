"""The run's directory: who may write there, and how its checkpoints become complete.

Invariant: one process at a time holds the lock; `latest.json` names only complete checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_megatron.errors import CheckpointError, RunDirectoryError, StoreError
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.trajectory.store import TrajectoryStore


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint: `step` optimizer steps are in it."""

    step: int
    directory: Path


class RunDirectory(RunFiles):
    """The files of one run and the operations on them that must be atomic."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._lock_file: Any = None

    def open(self, resume: bool) -> None:
        """Take the lock and refuse to mix runs.

        Raises:
            RunDirectoryError: another run holds the directory, or it holds a run and `resume` is
            off, or it
                holds none and `resume` is on.
        """
        if resume and not self.store_file.exists():
            raise RunDirectoryError(
                f"nothing to resume in {self.path}: it holds no run; start without --resume"
            )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock_file = self.lock_file.open("w")
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be written ({error.strerror}: {error.filename}); set run.root "
                "to a directory that can"
            ) from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunDirectoryError(
                f"{self.path} is in use by another run; wait for it, stop it, or set run.name to "
                "another name"
            ) from None
        if not resume and self._holds_run():
            raise RunDirectoryError(
                f"{self.path} holds a run already; continue it with --resume, or set run.name to "
                "another name"
            )

    def _holds_run(self) -> bool:
        """Whether anything was ever dispatched here: a start that failed before that, in an engine
        for example, can be mended and started again. A store that cannot be read counts."""
        if not self.store_file.exists():
            return False
        try:
            with TrajectoryStore(self.store_file, read_only=True) as store:
                return store.num_groups > 0
        except StoreError:
            return True

    def write_json(self, path: Path, value: Any, *, private: bool = False) -> None:
        """Write a JSON file so that readers see the old content or the new, never half of it.

        Args:
            private: only the user who runs this may read it.
        """
        staging = path.with_suffix(path.suffix + ".part")
        staging.unlink(missing_ok=True)  # an older one could have other permissions
        staging.touch(mode=0o600 if private else 0o666, exist_ok=False)
        with staging.open("w") as file:
            json.dump(value, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)

    def staging_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it counts."""
        return self.checkpoints / f"step_{step:06d}.part"

    def make_staging(self, step: int) -> Path:
        """Make `staging_of(step)`, empty."""
        staging = self.staging_of(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def commit_checkpoint(self, step: int, state: dict[str, Any], keep: int) -> Path:
        """Make the staged checkpoint of `step` the latest and drop all but the `keep` newest."""
        staging = self.staging_of(step)
        final = self.checkpoints / f"step_{step:06d}"
        self.write_json(staging / "state.json", state | {"step": step})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(staging, final)
        self.write_json(self.checkpoints / "latest.json", {"step": step, "directory": final.name})
        for old in sorted(self.checkpoints.glob("step_[0-9]*[0-9]"))[:-keep]:
            shutil.rmtree(old)
        return final

    def latest_checkpoint(self) -> CheckpointInfo | None:
        """The newest complete checkpoint, or None if there is none yet.

        Raises:
            CheckpointError: latest.json names a checkpoint that is not there.
        """
        pointer = self.checkpoints / "latest.json"
        if not pointer.exists():
            return None
        value = json.loads(pointer.read_text())
        directory = self.checkpoints / value["directory"]
        if not (directory / "state.json").is_file():
            raise CheckpointError(
                f"{pointer} names {directory}, which is missing or incomplete; restore it, or "
                "delete latest.json to "
                "start again from the initial weights"
            )
        return CheckpointInfo(value["step"], directory)

    def checkpoint_at(self, step: int | None = None) -> CheckpointInfo:
        """The complete checkpoint of `step`, or the latest.

        Raises:
            CheckpointError: there is none; the message lists those that there are.
        """
        if step is None:
            latest = self.latest_checkpoint()
            if latest is None:
                raise CheckpointError(
                    f"{self.path} has no checkpoint yet; wait for the first (every "
                    "run.checkpoint_interval steps, and at the end)"
                )
            return latest
        directory = self.checkpoints / f"step_{step:06d}"
        if not (directory / "state.json").is_file():
            complete = sorted(
                file.parent.name for file in self.checkpoints.glob("step_*/state.json")
            )
            steps = [int(name.removeprefix("step_")) for name in complete if "." not in name]
            kept = f"those it keeps are {steps}" if steps else "it has none yet"
            raise CheckpointError(f"{self.path} has no checkpoint of step {step}; {kept}")
        return CheckpointInfo(step, directory)
