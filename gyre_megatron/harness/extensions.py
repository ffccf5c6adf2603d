"""What users bring to the harness room: tasks, evaluators, commands, and harnesses of their own.

Loaded and checked before a run writes anything, so that a mistake in a task never ends a run that
is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_megatron.config.rollout import HarnessConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.harness.commands import check_words, split_command
from gyre_megatron.harness.harnesses import Harness, load_harness
from gyre_megatron.harness.task_spec import Task
from gyre_megatron.harness.tasks import TaskSet

COMMAND_PLACEHOLDERS = ("prompt", "prompt_file", "workspace", "task", "model", "base_url")


@dataclass(frozen=True)
class HarnessExtensions:
    """What the configuration names, loaded."""

    tasks: TaskSet
    harness: Harness


def load_extensions(config: HarnessConfig) -> HarnessExtensions:
    """Load the tasks with their evaluators, and the harness; check every command.

    Raises:
        ConfigError: a task, an evaluator, a command or the harness is wrong; the message names it.
    """
    harness = load_harness(config.kind)
    if config.tasks is None:
        raise ConfigError(
            "rollout.harness.tasks is not set: name a directory of tasks (each a task.yaml)"
        )
    tasks = TaskSet.load(config.tasks)
    for task in tasks.values():
        words = command_words(task, config)
        if not words and config.kind == "command":
            raise ConfigError(
                f"task {task.name} names no command and rollout.harness.command is not set"
            )
    return HarnessExtensions(tasks, harness)


def command_words(task: Task, config: HarnessConfig) -> list[str]:
    """The words of a task's harness, placeholders still in them; none if there is no command.

    Raises:
        ConfigError: the command cannot be cut into words, or a placeholder is unknown.
    """
    command = task.command if task.command is not None else config.command
    if command is None:
        return []
    key = "rollout.harness.command"
    if task.command is not None:
        key = f"{task.directory / 'task.yaml'}: command"
    words = split_command(command, key)
    check_words(words, COMMAND_PLACEHOLDERS, key)
    check_words(config.container_prefix, COMMAND_PLACEHOLDERS, "rollout.harness.container_prefix")
    return [*config.container_prefix, *words]
