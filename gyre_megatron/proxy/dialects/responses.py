"""OpenAI Responses (stateless: each request carries its whole input): answers, whole and as events.

Bodies are read in `responses_request`.
"""

from __future__ import annotations

from typing import Any

import orjson

from gyre_megatron.proxy.dialects import responses_request
from gyre_megatron.proxy.dialects.base import Answer, Dialect, sse
from gyre_megatron.proxy.dialects.responses_request import custom_tools, namespace_of
from gyre_megatron.text.conversation import BadRequest, CallRequest, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

# Where a call's arguments stand in its item, and what their events are called.
_ARGUMENTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = "responses"
    paths = ("/v1/responses", "/responses")
    body_type = responses_request.ResponsesBody
    overflow_in_stream = True

    def parse(self, body: bytes) -> CallRequest:
        """See Dialect.parse."""
        return responses_request.parse(body, self.name)

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
        part = self._open
        if part is None:
            return b""
        self._open = None
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
        field, kind = _ARGUMENTS[item["type"]]
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
    return {
        "id": f"resp_{answer.call_id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.body.instructions,
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
    if call.name in custom_tools(request.body):
        value = orjson.loads(call.arguments).get("input", "")
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        return {"type": "custom_tool_call", **common, "input": text}
    namespace = namespace_of(request.body, call.name)
    inside = {"namespace": namespace} if namespace else {}
    return {"type": "function_call", **common, **inside, "arguments": call.arguments}
