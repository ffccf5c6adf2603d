"""The task set: every task.yaml of a directory, checked with its evaluator before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from gyre_megatron.config.base import one_line
from gyre_megatron.config.sources import read_mapping
from gyre_megatron.errors import ConfigError
from gyre_megatron.harness.commands import check_words, split_command
from gyre_megatron.harness.evaluators import EVALUATOR_PLACEHOLDERS, load_evaluator
from gyre_megatron.harness.task_spec import EvaluatorSpec, Task

__all__ = ["EvaluatorSpec", "Task", "TaskSet"]


class TaskSet(Mapping[str, Task]):
    """Tasks by name, in the order of their names."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.name: task for task in sorted(tasks, key=lambda task: task.name)}
        if len(self._tasks) < len(tasks):
            (name, count), *_ = Counter(task.name for task in tasks).most_common()
            raise ConfigError(f"{count} tasks have the name {name!r}; give each its own")

    @classmethod
    def load(cls, directory: str | Path) -> TaskSet:
        """Read every `*/task.yaml` of a directory and load its evaluator.

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
    if spec.kind == "command":
        key = f"{file}: evaluator.command"
        check_words(split_command(spec.command, key), EVALUATOR_PLACEHOLDERS, key)
    try:
        load_evaluator(task)
    except ConfigError as error:
        # What somebody's module raised while it was imported may have many lines.
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
