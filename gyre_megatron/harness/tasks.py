"""The task set: what a query asks, what lies in the workspace, and how the result is scored.

A task is a directory: `task.yaml`, optional `workspace/` (copied in before the harness starts) and
whatever its evaluator needs (`hidden/` tests, a script); nothing but `workspace/` is ever visible
to the harness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from gyre_megatron.config.base import Section, one_line
from gyre_megatron.config.sources import read_mapping
from gyre_megatron.errors import ConfigError


class EvaluatorSpec(Section):
    """How a task is scored."""

    kind: Literal["pytest", "command", "python"]
    tests: str = "hidden"
    """pytest: directory of the hidden suite, inside the task."""
    num_tests: int = 0
    """pytest: tests of the suite, the denominator; collection errors then count as failures."""
    command: str = ""
    """command: program and words, run in a copy of the workspace; {task} and {workspace} are filled
    in; prints JSON."""
    function: str = ""
    """python: `module:function` or `file.py:function` (inside the task); called with (workspace,
    task directory)."""
    timeout_s: float | None = None
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
    timeout_s: float | None = None
    """Wall time of the harness; null takes rollout.harness.timeout_s."""
    tags: list[str] = Field(default_factory=list)
    directory: Path = Path()
    """Where the task lies; set when it is loaded."""

    def query(self) -> dict[str, Any]:
        """What the store keeps of a group that runs this task."""
        return {"task": self.name}


class TaskSet(Mapping[str, Task]):
    """Tasks by name, in the order of their names."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = {task.name: task for task in sorted(tasks, key=lambda task: task.name)}

    @classmethod
    def load(cls, directory: str | Path) -> TaskSet:
        """Read every `*/task.yaml` of a directory.

        Raises:
            ConfigError: there is none, or one is wrong.
        """
        if not Path(directory).is_dir():
            raise ConfigError(
                f"no task in {directory}, which is no directory; set rollout.harness.tasks to one "
                "whose sub-directories hold a task.yaml each"
            )
        files = sorted(Path(directory).glob("*/task.yaml"))
        if not files:
            raise ConfigError(
                f"no task in {directory}: expected sub-directories that hold a task.yaml"
            )
        return cls([_load(file) for file in files])

    def __getitem__(self, name: str) -> Task:
        if name not in self._tasks:
            raise ConfigError(f"no task {name!r}; there are {', '.join(list(self._tasks)[:20])}")
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def _load(file: Path) -> Task:
    fields = read_mapping(file, "a mapping of a task's fields")
    try:
        task = Task.model_validate(
            {"name": file.parent.name, **fields, "directory": file.parent.resolve()}
        )
    except ValidationError as error:
        raise ConfigError(f"{file} is no task: {one_line(error)}") from None
    _check_evaluator(task, file)
    return task


def _check_evaluator(task: Task, file: Path) -> None:
    spec = task.evaluator
    if spec.kind == "pytest" and not (task.directory / spec.tests).is_dir():
        raise ConfigError(f"{file}: the hidden suite {spec.tests!r} is not a directory of the task")
    if spec.kind == "pytest" and spec.num_tests < 1:
        raise ConfigError(f"{file}: evaluator.num_tests must give the number of hidden tests")
    if spec.kind == "command" and not spec.command:
        raise ConfigError(f"{file}: evaluator.command is empty")
    if spec.kind == "python" and spec.function.count(":") != 1:
        raise ConfigError(f"{file}: evaluator.function must be module:function or file.py:function")
