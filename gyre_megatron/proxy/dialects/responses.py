"""OpenAI Responses (stateless: each request carries its whole input)."""

from __future__ import annotations

from typing import Any

import orjson

from gyre_megatron.proxy.dialects import base
from gyre_megatron.proxy.dialects.base import Answer, sse
from gyre_megatron.text.conversation import (
    BadRequest,
    CallRequest,
    Message,
    ToolCall,
    provenance_of,
)
from gyre_megatron.text.output_parser import OutputEvent

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class Responses:
    """`POST /v1/responses`."""

    name = "responses"
    overflow_in_stream = True

    def parse(self, body: dict[str, Any]) -> CallRequest:
        """See Dialect.parse."""
        if body.get("previous_response_id") is not None:
            raise BadRequest(
                "previous_response_id: responses are not kept; send the whole input instead"
            )
        return CallRequest(
            dialect=self.name,
            model=base.text_of(body.get("model"), "model"),
            messages=_messages(body),
            tools=_tools(body),
            max_tokens=base.whole(body, "max_output_tokens"),
            temperature=base.number(body, "temperature", 0.0, 2.0),
            top_p=base.number(body, "top_p", 0.0, 1.0),
            stream=body.get("stream") is True,
            body=body,
        )

    def writer(self, request: CallRequest, answer: Answer) -> ResponsesWriter:
        """See Dialect.writer."""
        return ResponsesWriter(request, answer)

    def body(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        """See Dialect.body."""
        items = [_item(request, answer, index, part) for index, part in enumerate(answer.parts)]
        return _response(request, answer, _status(answer), items)

    def error(self, error: BadRequest) -> dict[str, Any]:
        """See Dialect.error."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": _code(error)}}


class ResponsesWriter:
    """See StreamWriter. An item is opened by its first piece and closed by the next item or the
    end."""

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: OutputEvent | None = None

    def start(self) -> bytes:
        response = _response(self._request, self._answer, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ping(self) -> bytes:
        return b": ping\n\n"

    def part(self, part: OutputEvent | ToolCall) -> bytes:
        if isinstance(part, ToolCall):
            return self._close() + self._tool(part)
        if self._open is None or self._open.kind != part.kind:
            events = self._close() + self._begin(part)
        else:
            events = b""
            self._open = OutputEvent(part.kind, self._open.text + part.text)
        name = (
            "response.output_text.delta"
            if part.kind == "text"
            else "response.reasoning_summary_text.delta"
        )
        return events + self._event(name, **self._place(part.kind), delta=part.text)

    def finish(self) -> bytes:
        events = self._close()
        status = _status(self._answer)
        return events + self._event(
            f"response.{status}",
            response=_response(self._request, self._answer, status, self._items),
        )

    def fail(self, error: BadRequest) -> bytes:
        response = _response(self._request, self._answer, "failed", self._items)
        response["error"] = {"code": _code(error) or "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    def _begin(self, part: OutputEvent) -> bytes:
        self._open = part
        item = _item(self._request, self._answer, len(self._items), OutputEvent(part.kind, ""))
        item["status"] = "in_progress"
        opened = {**item, "content" if part.kind == "text" else "summary": []}
        events = self._event(
            "response.output_item.added", output_index=len(self._items), item=opened
        )
        name = (
            "response.content_part.added"
            if part.kind == "text"
            else "response.reasoning_summary_part.added"
        )
        return events + self._event(
            name, **self._place(part.kind), part=_content(OutputEvent(part.kind, ""))
        )

    def _close(self) -> bytes:
        part, self._open = self._open, None
        if part is None:
            return b""
        place = self._place(part.kind)
        prefix = (
            "response.output_text" if part.kind == "text" else "response.reasoning_summary_text"
        )
        ended = (
            "response.content_part" if part.kind == "text" else "response.reasoning_summary_part"
        )
        events = self._event(f"{prefix}.done", **place, text=part.text)
        events += self._event(f"{ended}.done", **place, part=_content(part))
        return events + self._done(_item(self._request, self._answer, len(self._items), part))

    def _tool(self, call: ToolCall) -> bytes:
        index = len(self._items)
        item = _item(self._request, self._answer, index, call)
        field = _CALLS[item["type"]]
        kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        place = {"item_id": item["id"], "output_index": index}
        events = self._event(
            "response.output_item.added",
            output_index=index,
            item={**item, field: "", "status": "in_progress"},
        )
        events += self._event(f"response.{kind}.delta", **place, delta=item[field])
        events += self._event(
            f"response.{kind}.done", **place, **{field: item[field]}, name=call.name
        )
        return events + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item
        )

    def _place(self, kind: str) -> dict[str, Any]:
        index = len(self._items)
        inner = {"content_index": 0} if kind == "text" else {"summary_index": 0}
        return {"item_id": _item_id(kind, self._answer, index), "output_index": index, **inner}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        extra: dict[str, Any] = {"logprobs": []} if kind.startswith("response.output_text.") else {}
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields, **extra}, kind)


def _response(
    request: CallRequest, answer: Answer, status: str, items: list[dict[str, Any]]
) -> dict[str, Any]:
    ended = status in ("completed", "incomplete")
    body = request.body
    return {
        "id": f"resp_{answer.call_id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(answer) if ended else None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
        "output_tokens": answer.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _code(error: BadRequest) -> str | None:
    return {"overflow": "context_length_exceeded", "authentication": "invalid_api_key"}.get(
        error.kind
    )


def _item_id(kind: str, answer: Answer, index: int) -> str:
    return f"{'msg' if kind == 'text' else 'rs'}_{answer.call_id}_{index}"


def _content(part: OutputEvent) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "summary_text", "text": part.text}


def _item(
    request: CallRequest, answer: Answer, index: int, part: OutputEvent | ToolCall
) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return _call_item(request, part)
    item_id = _item_id(part.kind, answer, index)
    if part.kind == "text":
        return {
            "type": "message",
            "id": item_id,
            "role": "assistant",
            "status": "completed",
            "content": [_content(part)],
        }
    mark = f"call_{answer.call_id}_0"
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [_content(part)],
        "encrypted_content": mark,
    }


def _call_item(request: CallRequest, call: ToolCall) -> dict[str, Any]:
    common = {
        "id": f"fc_{call.call_id}",
        "call_id": f"call_{call.call_id}",
        "name": call.name,
        "status": "completed",
    }
    if call.name in _custom_tools(request.body):
        value = orjson.loads(call.arguments).get("input", "")
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        return {"type": "custom_tool_call", **common, "input": text}
    namespace = _namespace_of(request.body, call.name)
    inside = {"namespace": namespace} if namespace else {}
    return {"type": "function_call", **common, **inside, "arguments": call.arguments}


# parsing ------------------------------


def _custom_tools(body: dict[str, Any]) -> set[str]:
    tools = body.get("tools") or []
    return {
        str(tool.get("name"))
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "custom"
    }


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Functions (also those inside a namespace), and custom tools as functions of one `input`.

    Tools that a server would run, such as web_search, are not offered to the model.
    """
    tools = []
    for where, tool in _flat(base.entries(body.get("tools"), "tools"), "tools"):
        if tool.get("type") == "function":
            tools.append(
                base.function_tool(
                    tool.get("name"), tool.get("description"), tool.get("parameters"), where
                )
            )
        elif tool.get("type") == "custom":
            schema = {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            }
            tools.append(
                base.function_tool(tool.get("name"), tool.get("description"), schema, where)
            )
    return tools


def _flat(tools: list[dict[str, Any]], where: str) -> list[tuple[str, dict[str, Any]]]:
    flat = []
    for index, tool in enumerate(tools):
        place = f"{where}.{index}"
        if tool.get("type") == "namespace":
            flat += [
                (f"{place}.tools.{i}", t)
                for i, t in enumerate(base.entries(tool.get("tools"), place))
            ]
        else:
            flat.append((place, tool))
    return flat


def _namespace_of(body: dict[str, Any], name: str) -> str | None:
    for tool in body.get("tools") or []:
        if tool.get("type") == "namespace" and any(
            inner.get("name") == name for inner in tool.get("tools") or []
        ):
            return str(tool.get("name"))
    return None


def _messages(body: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    instructions = base.text_of(body.get("instructions"), "instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": base.clean(items)}]
    found = base.entries(items, "input")
    if not found:
        raise BadRequest("input: at least one item is required")
    for index, item in enumerate(found):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "reasoning":
        _assistant(messages, provenance_of(item.get("encrypted_content")))
    elif kind in _CALLS:
        call = _echoed(item, kind, where)
        message = _assistant(messages, provenance_of(call["id"]))
        message.setdefault("tool_calls", []).append(call)
    elif kind in _OUTPUTS:
        call_id = base.text_of(item.get("call_id"), f"{where}.call_id")
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), where)}
        )
    elif kind == "item_reference":
        raise BadRequest(
            f"{where}: items are not kept; send the item itself instead of a reference"
        )
    else:
        text = orjson.dumps(item, option=orjson.OPT_SORT_KEYS).decode()
        messages.append({"role": "user", "content": text})


def _add_message(messages: list[Message], item: dict[str, Any], where: str) -> None:
    role, text = item.get("role"), _text(item.get("content"), where)
    if role == "assistant":
        identity = item.get("id")
        parts = identity.split("_") if isinstance(identity, str) else []
        provenance = (
            provenance_of(f"call_{parts[1]}_0") if len(parts) == 3 and parts[0] == "msg" else None
        )
        message = _assistant(messages, provenance)
        message["content"] += text
    elif role in ("system", "developer"):
        messages.append({"role": "system", "content": text})
    elif role == "user":
        messages.append({"role": "user", "content": text})
    else:
        raise BadRequest(
            f"{where}.role: expected user, assistant, system or developer, found {role!r}"
        )


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


def _echoed(item: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    arguments: Any = item.get(_CALLS[kind])
    if kind == "custom_tool_call":
        arguments = {"input": base.text_of(arguments, f"{where}.input")}
    name = base.text_of(item.get("name"), f"{where}.name") or kind
    call_id = base.text_of(item.get("call_id"), f"{where}.call_id")
    parsed = base.arguments_of(arguments, f"{where}.{_CALLS[kind]}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    texts = []
    for part in base.blocks(content, where, _TEXT_TYPES):
        if part["type"] not in _TEXT_TYPES:
            raise BadRequest(
                f"{where}: this model reads text only; leave out the {part['type']} part"
            )
        texts.append(base.text_of(part.get("text", part.get("refusal")), where))
    return "\n\n".join(texts)
