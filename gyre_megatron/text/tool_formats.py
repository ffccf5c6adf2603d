"""How models write tool calls, and reading them back: Hermes JSON and Qwen3-Coder XML.

A format turns the text between its tags into calls; text that is no valid call stays text. One of
your own is named under `rollout.proxy.tool_call_format` as `module:function`: it is given the chat
template and returns a `ToolFormat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

ParsedCall = tuple[str, dict[str, Any]]
"""Name and arguments."""


@runtime_checkable
class ToolFormat(Protocol):
    """Reads what stands between two tags."""

    open_tag: str
    close_tag: str

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> list[ParsedCall]:
        """The calls, in order; none if the text is no call.

        Args:
            body: What the model wrote between the tags.
            tools: Functions in OpenAI form, for the types of arguments.
        """


class HermesJson:
    """`{"name": ..., "arguments": {...}}` (Hermes, Qwen2.5, Qwen3)."""

    open_tag = OPEN
    close_tag = CLOSE

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> list[ParsedCall]:
        """See ToolFormat.parse."""
        try:
            value = json.loads(body)
        except ValueError:
            return []
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("name"), str)
            or not value["name"]
        ):
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return []
        return [(value["name"], arguments)] if isinstance(arguments, dict) else []


_FUNCTION = re.compile(r"^\s*<function=([^>\s]+)>(.*)</function>\s*$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class Qwen3CoderXml:
    """`<function=name><parameter=key>value</parameter></function>`; values take the type of the
    tool's schema."""

    open_tag = OPEN
    close_tag = CLOSE

    def parse(self, body: str, tools: Sequence[dict[str, Any]]) -> list[ParsedCall]:
        """See ToolFormat.parse."""
        match = _FUNCTION.match(body)
        if match is None:
            return []
        name, inner = match.groups()
        if _PARAMETER.sub("", inner).strip():
            return []
        schema = _properties(name, tools)
        arguments = {
            key: _typed(value, schema.get(key, {})) for key, value in _PARAMETER.findall(inner)
        }
        return [(name, arguments)]


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


ToolFormatMaker = Callable[[str], ToolFormat | None]

TOOL_FORMATS: ExtensionPoint[ToolFormatMaker] = ExtensionPoint(
    key="rollout.proxy.tool_call_format",
    parameters=("template_source",),
    builtin={
        "auto": lambda template_source: FORMATS.get(detect_format(template_source)),
        "none": lambda template_source: None,
        "hermes": lambda template_source: FORMATS["hermes"],
        "qwen3_coder": lambda template_source: FORMATS["qwen3_coder"],
    },
    returns="ToolFormat | None",
)


def load_tool_format(name: str, template_source: str) -> ToolFormat | None:
    """The format that `rollout.proxy.tool_call_format` names; None leaves tool calls as text.

    Raises:
        ConfigError: there is no such format, or what was made is none.
    """
    made = TOOL_FORMATS.load(name)(template_source)
    if made is not None and not isinstance(made, ToolFormat):
        raise ConfigError(
            f"{TOOL_FORMATS.key}: {name} returned a {type(made).__name__}; expected an object with "
            "open_tag, close_tag and parse(body, tools), or None"
        )
    return made
