"""Bodies of OpenAI Responses, and the conversation they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gyre_megatron.proxy.dialects import bodies
from gyre_megatron.proxy.dialects.bodies import RefusalBlock, TextBlock
from gyre_megatron.text.conversation import BadRequest, CallRequest, Message, provenance_of

ROLES = ("user", "assistant", "system", "developer")
_PARTS: dict[str, type[msgspec.Struct]] = {
    "input_text": TextBlock,
    "output_text": TextBlock,
    "text": TextBlock,
    "summary_text": TextBlock,
    "reasoning_text": TextBlock,
    "refusal": RefusalBlock,
}
Parts = list[str | Annotated[dict[str, Any], bodies.blocks(_PARTS)]]
# The only argument of a custom tool, which takes free text.
_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class MessageItem(msgspec.Struct):
    """A message; items without a type are messages."""

    role: Annotated[str, bodies.one_of(*ROLES)]
    content: str | Parts | None = None
    id: Any = None


class ReasoningItem(msgspec.Struct):
    """Reasoning that is echoed; its mark names our call."""

    encrypted_content: Any = None


class FunctionCallItem(msgspec.Struct):
    """A tool call that is echoed."""

    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class CustomToolCallItem(msgspec.Struct):
    """A call of a tool that takes free text."""

    call_id: str | None = None
    name: str | None = None
    input: str | None = None


class LocalShellCallItem(msgspec.Struct):
    """A call of the provider's shell tool."""

    call_id: str | None = None
    action: str | dict[str, Any] | None = None


class OutputItem(msgspec.Struct):
    """What a tool gave back."""

    call_id: str | None = None
    output: str | Parts | None = None


_ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomToolCallItem,
    "local_shell_call": LocalShellCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call_output": OutputItem,
    "local_shell_call_output": OutputItem,
}
Items = list[Annotated[dict[str, Any], bodies.blocks(_ITEMS, others=True)]]


class Tool(msgspec.Struct):
    """A tool; of a type that is not known here it is run by the provider's own servers."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolOrNamespace(Tool):
    """A tool, or several under one name."""

    tools: list[Tool] | None = None


class ResponsesBody(msgspec.Struct):
    """The body of `POST /v1/responses`."""

    input: str | Annotated[Items, Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: bodies.TokenLimit | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.Probability | None = None
    stream: bool | None = None
    tools: list[ToolOrNamespace] | None = None
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(ResponsesBody)


def parse(data: bytes, dialect: str) -> CallRequest:
    """Read a body.

    Raises:
        BadRequest: it cannot be served.
    """
    body = bodies.decode(_decoder, data)
    if body.previous_response_id is not None:
        raise BadRequest(
            "previous_response_id: responses are not kept; send the whole input instead"
        )
    return CallRequest(
        dialect=dialect,
        model=body.model or "",
        messages=_messages(body),
        tools=_tools(body),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=bool(body.stream),
        system_text=body.instructions or "",
        body=body,
    )


def custom_tools(body: ResponsesBody) -> set[str]:
    """Names of the tools that take free text."""
    return {tool.name for _, _, tool in _flat(body) if tool.type == "custom" and tool.name}


def namespace_of(body: ResponsesBody, name: str) -> str | None:
    """The namespace that a tool was offered in, if in any."""
    spaces = (namespace for _, namespace, tool in _flat(body) if tool.name == name)
    return next(filter(None, spaces), None)


def _flat(body: ResponsesBody) -> Iterator[tuple[str, str | None, Tool]]:
    """Every tool with its place and its namespace."""
    for index, tool in enumerate(body.tools or []):
        place = f"tools.{index}"
        if tool.type != "namespace":
            yield place, None, tool
            continue
        for inner_index, inner in enumerate(tool.tools or []):
            yield f"{place}.tools.{inner_index}", tool.name, inner


def _tools(body: ResponsesBody) -> list[dict[str, Any]]:
    """Functions, and custom tools as functions of one `input`.

    Those that a server would run, such as web_search, are not offered to the model.
    """
    schemas = {"function": lambda tool: tool.parameters, "custom": lambda _: _CUSTOM_SCHEMA}
    return [
        bodies.function_tool(tool.name, tool.description, schemas[tool.type](tool), place)
        for place, _, tool in _flat(body)
        if tool.type in schemas
    ]


def _messages(body: ResponsesBody) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    typed = item if item.get("type") else {**item, "type": "message"}
    kind, found = bodies.block_of(typed, _ITEMS, where)
    if isinstance(found, MessageItem):
        _add_message(messages, found, where)
    elif isinstance(found, ReasoningItem):
        _assistant(messages, provenance_of(found.encrypted_content))
    elif isinstance(found, FunctionCallItem | CustomToolCallItem | LocalShellCallItem):
        message = _assistant(messages, provenance_of(found.call_id))
        message.setdefault("tool_calls", []).append(_echoed(found, kind))
    elif isinstance(found, OutputItem):
        content = bodies.text_of(found.output, _PARTS, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": found.call_id or "", "content": content})
    elif kind == "item_reference":
        raise BadRequest(
            f"{where}: items are not kept; send the item itself instead of a reference"
        )
    else:
        messages.append({"role": "user", "content": bodies.json_text(item)})


def _add_message(messages: list[Message], item: MessageItem, where: str) -> None:
    text = bodies.text_of(item.content, _PARTS, f"{where}.content")
    if item.role == "assistant":
        message = _assistant(messages, _provenance_of_message(item.id))
        message["content"] += text
    elif item.role in ("system", "developer"):
        messages.append({"role": "system", "content": text})
    elif item.role == "user":
        messages.append({"role": "user", "content": text})
    else:
        raise BadRequest(
            f"{where}.role: expected {', '.join(ROLES)}, found {bodies.short(item.role)}"
        )


def _provenance_of_message(identity: Any) -> str | None:
    """The call that made a message item: its id is ours, `msg_CALL_INDEX`."""
    parts = identity.split("_") if isinstance(identity, str) else []
    if len(parts) != 3 or parts[0] != "msg":
        return None
    return provenance_of(f"call_{parts[1]}_0")


def _assistant(messages: list[Message], provenance: str | None) -> Message:
    """The answer that the last items belong to, or a new one where another call begins."""
    last = messages[-1] if messages else {}
    known = last.get("provenance")
    if last.get("role") != "assistant" or (provenance and known and provenance != known):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if provenance:
        last["provenance"] = provenance
    return last


def _echoed(
    item: FunctionCallItem | CustomToolCallItem | LocalShellCallItem, kind: str
) -> dict[str, Any]:
    if isinstance(item, CustomToolCallItem):
        return bodies.echoed_call(item.call_id, item.name or kind, {"input": item.input or ""})
    if isinstance(item, LocalShellCallItem):
        return bodies.echoed_call(item.call_id, kind, item.action)
    return bodies.echoed_call(item.call_id, item.name or kind, item.arguments)
