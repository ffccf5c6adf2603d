"""Harness programs: tasks, workspaces, runner, evaluators."""
