"""OpenAI Chat Completions: answers, whole and as events. Bodies are read in `chat_request`."""

from __future__ import annotations

from typing import Any

from gyre_megatron.proxy.dialects import chat_request
from gyre_megatron.proxy.dialects.base import Answer, Dialect, sse
from gyre_megatron.text.conversation import BadRequest, CallRequest, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

_FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "stop_sequence": "stop"}


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    name = "chat"
    paths = ("/v1/chat/completions", "/chat/completions")
    body_type = chat_request.ChatBody

    def parse(self, body: bytes) -> CallRequest:
        """See Dialect.parse."""
        return chat_request.parse(body, self.name)

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
        message = str(error)
        code = None
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
            index = self._num_calls
            self._num_calls += 1
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
