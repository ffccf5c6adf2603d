"""OpenAPI descriptions of the three dialects' bodies: what is read, no more; everything else is let
through."""

from __future__ import annotations

from typing import Any

_JSON = dict[str, Any]
_TEXT: _JSON = {"type": "string"}
_SAMPLING: _JSON = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}
_PARAMETERS: _JSON = {
    "type": "object",
    "properties": {"type": {"const": "object"}, "properties": {"type": "object"}},
}


def _object(required: list[str], **properties: _JSON) -> _JSON:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: _JSON, least: int = 0) -> _JSON:
    return {"type": "array", "items": items, "minItems": least}


def _either(*options: _JSON) -> _JSON:
    return {"anyOf": list(options)}


def _body(name: str, required: list[str], **properties: _JSON) -> _JSON:
    schema = _object(["model", *required], model=_TEXT, **_SAMPLING, **properties)
    answers = {
        "200": {"description": "The answer, whole or as server-sent events."},
        "400": {"description": "The request cannot be served; the message says why."},
        "401": {"description": "The token belongs to no running execution."},
        "413": {"description": "The body is too large."},
    }
    content = {"application/json": {"schema": schema}}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": answers,
        "operationId": name,
    }


def _block(kind: str, **properties: _JSON) -> _JSON:
    return _object(["type", *properties], type={"const": kind}, **properties)


_BLOCKS = _list(
    _either(
        _block("text", text=_TEXT),
        _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"}),
        _block(
            "tool_result",
            tool_use_id=_TEXT,
            content=_either(_TEXT, _list(_block("text", text=_TEXT))),
        ),
        _block("thinking", thinking=_TEXT, signature=_TEXT),
        _block("image", source={"type": "object"}),
    )
)
_WHOLE: _JSON = {"type": "integer", "minimum": 1, "maximum": 64}

ANTHROPIC = _body(
    "anthropic_messages",
    ["messages", "max_tokens"],
    max_tokens=_WHOLE,
    messages=_list(
        _object(
            ["role", "content"],
            role={"enum": ["user", "assistant", "system"]},
            content=_either(_TEXT, _BLOCKS),
        ),
        1,
    ),
    system=_either(_TEXT, _list(_block("text", text=_TEXT))),
    tools=_list(
        _object(
            ["name", "input_schema"],
            name={"type": "string", "minLength": 1},
            input_schema=_PARAMETERS,
        )
    ),
    stop_sequences=_list(_TEXT),
    thinking=_object(["type"], type={"enum": ["enabled", "adaptive", "disabled"]}),
)

_CALLED = _object(["name"], name=_TEXT, arguments=_TEXT)
_FUNCTION = _object(
    ["name"], name={"type": "string", "minLength": 1}, description=_TEXT, parameters=_PARAMETERS
)

CHAT = _body(
    "chat_completions",
    ["messages"],
    max_completion_tokens=_WHOLE,
    messages=_list(
        _object(
            ["role", "content"],
            role={"enum": ["system", "developer", "user", "assistant", "tool"]},
            content=_either(_TEXT, {"type": "null"}, _list(_block("text", text=_TEXT))),
            tool_call_id=_TEXT,
            tool_calls=_list(
                _object(
                    ["id", "function"],
                    id=_TEXT,
                    function=_object(["name"], name=_TEXT, arguments=_TEXT),
                )
            ),
        ),
        1,
    ),
    tools=_list(_object(["type", "function"], type={"const": "function"}, function=_FUNCTION)),
    stop=_either(_TEXT, _list(_TEXT)),
)

RESPONSES = _body(
    "responses",
    ["input"],
    max_output_tokens=_WHOLE,
    instructions=_TEXT,
    input=_either(
        _TEXT,
        _list(
            _either(
                _object(
                    ["role", "content"],
                    role={"enum": ["user", "assistant", "developer"]},
                    content=_TEXT,
                ),
                _block("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
                _block("function_call_output", call_id=_TEXT, output=_TEXT),
                _block("reasoning", summary=_list({"type": "object"})),
            ),
            1,
        ),
    ),
    tools=_list(_object(["type"], type={"enum": ["function", "custom", "web_search"]}, name=_TEXT)),
)
