"""Where a run keeps what.

```
runs/NAME/ lock  config.json  store.db  metrics.jsonl  timeline.jsonl
           checkpoints/step_000010/  checkpoints/latest.json  logs/  tensorboard/
           control_plane.json (while running)  summary.json  timeline.png  reward.png
```
"""

from __future__ import annotations

from pathlib import Path


class RunFiles:
    """Paths of one run; reads and writes nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def lock_file(self) -> Path:
        """Locked by the process that writes here."""
        return self.path / "lock"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def summary_file(self) -> Path:
        """Written once, at the end of a run that went well."""
        return self.path / "summary.json"

    @property
    def store_file(self) -> Path:
        return self.path / "store.db"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_file(self) -> Path:
        return self.path / "timeline.jsonl"

    @property
    def endpoint_file(self) -> Path:
        """Address and token of the running control plane."""
        return self.path / "control_plane.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"
