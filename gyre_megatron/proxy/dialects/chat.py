"""OpenAI Chat Completions."""

from __future__ import annotations

from typing import Any

from gyre_megatron.proxy.dialects import base
from gyre_megatron.proxy.dialects.base import Answer, sse
from gyre_megatron.text.conversation import BadRequest, CallRequest, Message, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

_FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "stop_sequence": "stop"}
_NO_MEDIA = "this model reads text only; leave out the {kind} part"


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    name = "chat"
    overflow_in_stream = False

    def parse(self, body: dict[str, Any]) -> CallRequest:
        """See Dialect.parse."""
        if body.get("n") not in (None, 1):
            raise BadRequest(
                "n: only one choice is served per call; send the request again for another answer"
            )
        options = base.options(body, "stream_options")
        limit = base.whole(body, "max_completion_tokens")
        return CallRequest(
            dialect=self.name,
            model=base.text_of(body.get("model"), "model"),
            messages=_messages(body),
            tools=_tools(body),
            max_tokens=limit if limit is not None else base.whole(body, "max_tokens"),
            temperature=base.number(body, "temperature", 0.0, 2.0),
            top_p=base.number(body, "top_p", 0.0, 1.0),
            top_k=base.whole(body, "top_k", low=-1),
            stop=base.strings(body.get("stop"), "stop"),
            stream=body.get("stream") is True,
            include_usage=options.get("include_usage") is True,
            body=body,
        )

    def writer(self, request: CallRequest, answer: Answer) -> ChatWriter:
        """See Dialect.writer."""
        return ChatWriter(request, answer)

    def body(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        """See Dialect.body."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text or (None if answer.tool_calls else ""),
        }
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if answer.tool_calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in answer.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _FINISH[answer.finish_reason],
        }
        return {
            **_envelope(answer, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answer),
        }

    def error(self, error: BadRequest) -> dict[str, Any]:
        """See Dialect.error."""
        message, code = str(error), None
        if error.kind == "overflow":
            code = "context_length_exceeded"
            message = (
                f"This model's maximum context length is {error.numbers[1]} tokens. However, your "
                "messages resulted in "
                f"{error.numbers[0]} tokens. Please reduce the length of the messages."
            )
        elif error.status == 401:
            code = "invalid_api_key"
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatWriter:
    """See StreamWriter."""

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._num_calls = 0

    def start(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def ping(self) -> bytes:
        return b": ping\n\n"

    def part(self, part: OutputEvent | ToolCall) -> bytes:
        if isinstance(part, ToolCall):
            index, self._num_calls = self._num_calls, self._num_calls + 1
            # Name and arguments go in separate chunks: clients that merge deltas lose arguments
            # sent with the name.
            return self._delta({"tool_calls": [{"index": index, **_call(part, "")}]}) + self._delta(
                {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}
            )
        return self._delta(
            {"reasoning_content" if part.kind == "thinking" else "content": part.text}
        )

    def finish(self) -> bytes:
        events = self._delta({}, _FINISH[self._answer.finish_reason])
        if self._request.include_usage:
            envelope = _envelope(self._answer, "chat.completion.chunk")
            events += sse({**envelope, "choices": [], "usage": _usage(self._answer)})
        return events + b"data: [DONE]\n\n"

    def fail(self, error: BadRequest) -> bytes:
        return sse(ChatCompletions().error(error)) + b"data: [DONE]\n\n"

    def _delta(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse({**_envelope(self._answer, "chat.completion.chunk"), "choices": [choice]})


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.call_id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_output_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{call.call_id}", "type": "function", "function": function}


# parsing ------------------------------


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for index, tool in enumerate(base.entries(body.get("tools"), "tools")):
        function = tool.get("function")
        if not isinstance(function, dict):
            raise BadRequest(f"tools.{index}.function: expected an object")
        tools.append(
            base.function_tool(
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                f"tools.{index}.function",
            )
        )
    return tools


def _messages(body: dict[str, Any]) -> list[Message]:
    turns = base.entries(body.get("messages"), "messages")
    if not turns:
        raise BadRequest("messages: at least one message is required")
    return [_message(turn, f"messages.{index}") for index, turn in enumerate(turns)]


def _message(turn: dict[str, Any], where: str) -> Message:
    role = turn.get("role")
    content = _content(turn.get("content"), where)
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role == "user":
        return {"role": "user", "content": content}
    if role in ("tool", "function"):
        return {
            "role": "tool",
            "tool_call_id": base.text_of(turn.get("tool_call_id"), where),
            "content": content,
        }
    if role != "assistant":
        raise BadRequest(
            f"{where}.role: expected system, developer, user, assistant or tool, found {role!r}"
        )
    message: Message = {"role": "assistant", "content": content}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = base.clean(reasoning)
    calls = [
        _echoed(call, where) for call in base.entries(turn.get("tool_calls"), f"{where}.tool_calls")
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    texts = []
    for part in base.blocks(content, where):
        kind = part["type"]
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise BadRequest(f"{where}: " + _NO_MEDIA.format(kind=kind))
        texts.append(base.text_of(part.get("text", part.get("refusal")), where))
    return "\n\n".join(texts)


def _echoed(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.tool_calls: expected an object under function")
    name = base.text_of(function.get("name"), f"{where}.tool_calls.function.name")
    arguments = base.arguments_of(
        function.get("arguments"), f"{where}.tool_calls.function.arguments"
    )
    call_id = base.text_of(call.get("id"), f"{where}.tool_calls.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
