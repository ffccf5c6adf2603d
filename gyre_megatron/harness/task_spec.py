"""One task.yaml: what a query asks and how its result is scored, as plain values.

A task is a directory: `task.yaml`, optional `workspace/` (copied in before the harness starts) and
whatever its evaluator needs (`hidden/` tests, a script); nothing but `workspace/` is ever visible
to the harness.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from gyre_megatron.config.base import Section


class EvaluatorSpec(Section):
    """How a task is scored."""

    kind: str
    """pytest, command, or your own: the `file.py:function` (inside the task) or `module:function`
    that is called with (workspace, task directory) and gives a reward in [0, 1], or a dict with
    one. python is the same with the name under `function`."""
    tests: str = "hidden"
    """pytest: directory of the hidden suite, inside the task."""
    num_tests: int = Field(0, ge=0)
    """pytest: tests of the suite, the denominator; collection errors then count as failures."""
    command: str = ""
    """command: program and words, run in a copy of the workspace; {task} and {workspace} are filled
    in; prints JSON."""
    function: str = ""
    """python: the function's name."""
    timeout_s: float | None = Field(None, gt=0)
    """Null takes rollout.evaluator.timeout_s."""


class Task(Section):
    """One task.yaml."""

    name: str = ""
    """Null takes the directory's name."""
    prompt: str
    evaluator: EvaluatorSpec
    command: str | None = None
    """Harness command; null takes rollout.harness.command."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for the harness in addition."""
    timeout_s: float | None = Field(None, gt=0)
    """Wall time of the harness; null takes rollout.harness.timeout_s."""
    tags: list[str] = Field(default_factory=list)
    directory: Path = Path()
    """Where the task lies; set when it is loaded."""

    def query(self) -> dict[str, Any]:
        """What the store keeps of a group that runs this task."""
        return {"task": self.name}
