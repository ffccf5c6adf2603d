"""Harness programs: tasks, workspaces, runner, evaluators, and harnesses of your own."""

from gyre_megatron.harness.evaluators import EvaluatorFailure, Score, evaluate
from gyre_megatron.harness.extensions import HarnessExtensions, load_extensions
from gyre_megatron.harness.harnesses import HarnessNotStarted, HarnessRequest
from gyre_megatron.harness.runner import HarnessContext, run_execution
from gyre_megatron.harness.subprocesses import Finished, Limits, run_program
from gyre_megatron.harness.task_spec import EvaluatorSpec, Task
from gyre_megatron.harness.tasks import TaskSet

__all__ = [
    "EvaluatorFailure",
    "EvaluatorSpec",
    "Finished",
    "HarnessContext",
    "HarnessExtensions",
    "HarnessNotStarted",
    "HarnessRequest",
    "Limits",
    "Score",
    "Task",
    "TaskSet",
    "evaluate",
    "load_extensions",
    "run_execution",
    "run_program",
]
