"""How models write tool calls, and reading them back: Hermes JSON and Qwen3-Coder XML.

A format turns the text between its tags into (name, arguments); text that is no valid call stays
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Parsed = tuple[str, dict[str, Any]]


class ToolFormat(Protocol):
    """Reads what stands between <tool_call> and </tool_call>."""

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> Parsed | None:
        """(name, arguments), or None if the text is no call."""


class HermesJson:
    """`{"name": ..., "arguments": {...}}` (Hermes, Qwen2.5, Qwen3)."""

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> Parsed | None:
        try:
            value = json.loads(body)
        except ValueError:
            return None
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("name"), str)
            or not value["name"]
        ):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return None
        return (value["name"], arguments) if isinstance(arguments, dict) else None


_FUNCTION = re.compile(r"^\s*<function=([^>\s]+)>(.*)</function>\s*$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class Qwen3CoderXml:
    """`<function=name><parameter=key>value</parameter></function>`; values take the type of the
    tool's schema."""

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> Parsed | None:
        match = _FUNCTION.match(body)
        if match is None:
            return None
        name, inner = match.groups()
        if _PARAMETER.sub("", inner).strip():
            return None
        schema = _properties(name, tools)
        arguments = {
            key: _typed(value, schema.get(key, {})) for key, value in _PARAMETER.findall(inner)
        }
        return name, arguments


def _properties(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(value: str, schema: Any) -> Any:
    text = value.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


FORMATS: dict[str, ToolFormat] = {"hermes": HermesJson(), "qwen3_coder": Qwen3CoderXml()}


def detect_format(template_source: str) -> str:
    """Name of the format a chat template teaches; none if it has no <tool_call>."""
    if OPEN not in template_source:
        return "none"
    return "qwen3_coder" if "<function=" in template_source else "hermes"
