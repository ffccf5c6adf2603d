"""Public names of the proxy, of the harness room and of the engines' client, with their
signatures: what documents show and users build on."""

from __future__ import annotations

import inspect
from dataclasses import fields

from gyre_megatron import harness, proxy
from gyre_megatron.engines.client import EngineHttp

PROXY = {
    "create_proxy_app": ["store", "router", "renderer", "config", "model_name"],
    "serve": [
        "engine_urls",
        "store",
        "checkpoint",
        "host",
        "port",
        "config",
        "model_name",
        "on_ready",
    ],
    "load_extensions": ["config"],
}
HARNESS = {
    "evaluate": ["task", "workspace", "timeout_s", "environment"],
    "load_extensions": ["config"],
    "run_execution": ["context", "execution_id"],
    "run_program": ["command", "cwd", "environment", "limits"],
}
DIALECT = {
    "parse": ["self", "body"],
    "writer": ["self", "request", "answer"],
    "body": ["self", "request", "answer"],
    "error": ["self", "error"],
}
REQUEST = [
    "base_url",
    "key",
    "model",
    "prompt",
    "workspace",
    "timeout_s",
    "command",
    "environment",
    "limits",
]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_names_are_all_there_and_only_those() -> None:
    for room in (proxy, harness):
        assert len(set(room.__all__)) == len(room.__all__)
        assert all(hasattr(room, name) for name in room.__all__)
    assert set(PROXY) <= set(proxy.__all__) and set(HARNESS) <= set(harness.__all__)
    assert set(proxy.__all__) - set(PROXY) == {
        "CALL_ROLES",
        "Answer",
        "BadRequest",
        "CallRequest",
        "Dialect",
        "OutputEvent",
        "Recording",
        "StreamWriter",
        "ToolCall",
    }
    assert set(harness.__all__) - set(HARNESS) == {
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
    }


def test_signatures() -> None:
    assert {name: parameters(getattr(proxy, name)) for name in PROXY} == PROXY
    assert {name: parameters(getattr(harness, name)) for name in HARNESS} == HARNESS
    assert {name: parameters(getattr(proxy.Dialect, name)) for name in DIALECT} == DIALECT
    assert [field.name for field in fields(harness.HarnessRequest)] == REQUEST
    assert parameters(EngineHttp.post) == ["self", "path", "body", "timeout_s"]
    assert parameters(EngineHttp.get) == ["self", "path", "timeout_s"]
