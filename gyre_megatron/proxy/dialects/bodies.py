"""Request bodies of untrusted clients: decoded into msgspec structs, refused in one line.

The same structs are what /openapi.json publishes, so a bound that is not enforced is never
announced. Unknown fields are ignored, because clients send more with every release. JSON that was
decoded holds no lone surrogates: all of its text can be encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from msgspec import Meta

from gyre_megatron.text.conversation import BadRequest

Body = TypeVar("Body", bound=msgspec.Struct)

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TokenLimit = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # engines count tokens in 32 bits
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1 keeps all


class TextBlock(msgspec.Struct):
    """Text, in any of the names that blocks of text have."""

    text: str | None = None


class RefusalBlock(msgspec.Struct):
    """What a model said instead of an answer; it is text like any other."""

    refusal: str | None = None
    text: str | None = None


def one_of(*values: str | int) -> Meta:
    """Publishes the values of a field that code, which knows a better message, checks."""
    return Meta(extra_json_schema={"enum": list(values)})


def blocks(kinds: Mapping[str, type[msgspec.Struct]], others: bool = False) -> Meta:
    """Publishes the blocks of a list whose elements are decoded one by one by `block_of`.

    Args:
        kinds: Struct by the block's `type`.
        others: Whether blocks of other types are let through.
    """
    known = [_block_schema(kind, struct) for kind, struct in kinds.items()]
    any_type = {"properties": {"type": {"type": "string"}}, "required": ["type"]}
    return Meta(extra_json_schema={"anyOf": [*known, any_type] if others else known})


def _block_schema(kind: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    (_, schema), *_ = msgspec.json.schema(struct)["$defs"].items()
    properties = {"type": {"const": kind}, **schema["properties"]}
    return {"properties": properties, "required": ["type", *schema["required"]]}


def decode(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    """A whole body.

    Raises:
        BadRequest: it is no JSON, or not of the decoder's type; the message names the place.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(_explain(error, "")) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is not valid JSON for this server: nested too deeply") from None


def block_of(
    value: str | dict[str, Any], kinds: Mapping[str, type[msgspec.Struct]], where: str
) -> tuple[str, msgspec.Struct | None]:
    """A block's type, and the block as a struct where its type is one of `kinds`.

    Raises:
        BadRequest: it has no type, or its fields have other types than its kind's.
    """
    if isinstance(value, str):
        return "text", TextBlock(value)
    kind = value.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"{where}.type: expected a string, found {short(kind)}")
    struct = kinds.get(kind)
    return kind, None if struct is None else convert(value, struct, where)


def convert(value: dict[str, Any], struct: type[Body], where: str) -> Body:
    """An object that was decoded already, as a struct.

    Raises:
        BadRequest: its fields have other types; the message names the place, which is in `where`.
    """
    try:
        return msgspec.convert(value, struct)
    except msgspec.ValidationError as error:
        raise BadRequest(_explain(error, where)) from None


def blocks_and_places(
    content: str | list[str | dict[str, Any]] | None, where: str
) -> Iterator[tuple[str | dict[str, Any], str]]:
    """The blocks of a content, each with its place; a content that is one string is one block."""
    if content is None:
        return
    if isinstance(content, str):
        yield content, where
        return
    for index, block in enumerate(content):
        yield block, f"{where}.{index}"


def text_of(
    content: str | list[str | dict[str, Any]] | None,
    kinds: Mapping[str, type[msgspec.Struct]],
    where: str,
) -> str:
    """The texts and refusals of a content, a paragraph each.

    Raises:
        BadRequest: a block is of another kind, which a model that reads text cannot take.
    """
    texts: list[str] = []
    for block, place in blocks_and_places(content, where):
        kind, found = block_of(block, kinds, place)
        if isinstance(found, RefusalBlock):
            texts.append(found.text or found.refusal or "")
        elif isinstance(found, TextBlock):
            texts.append(found.text or "")
        else:
            raise BadRequest(f"{place}: this model reads text only; leave out the {kind} part")
    return "\n\n".join(texts)


def json_text(value: dict[str, Any], without: str = "") -> str:
    """A value of ours to show to the model as JSON, keys in order.

    Raises:
        BadRequest: it is nested too deeply, or holds a number beyond 64 bits.
    """
    shown = {key: inner for key, inner in value.items() if key != without}
    try:
        return orjson.dumps(shown, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:
        raise BadRequest(
            f"a value cannot be read: {error}; nest it less deeply and keep numbers to 64 bits"
        ) from None


def function_tool(
    name: str | None, description: str | None, parameters: dict[str, Any] | None, where: str
) -> dict[str, Any]:
    """A tool in OpenAI form, the one chat templates take."""
    if not name:
        raise BadRequest(f"{where}.name: expected a non-empty string, found {short(name)}")
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def echoed_call(call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    """A tool call of an earlier answer, in OpenAI form; arguments as an object where they are
    one."""
    function = {"name": name or "", "arguments": _arguments(arguments)}
    return {"id": call_id or "", "type": "function", "function": function}


def _arguments(value: dict[str, Any] | str | None) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    if not value:
        return {}
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return parsed if isinstance(parsed, dict) else value


def strings(value: str | list[str] | None) -> tuple[str, ...]:
    """A string or a list of strings; empty ones, which would match everywhere, are left out."""
    items = [value] if isinstance(value, str) else value or []
    return tuple(item for item in items if item)


def short(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _explain(error: msgspec.ValidationError, where: str) -> str:
    """msgspec's message with the place first: `messages.0.content: expected str, got int`."""
    what, _, place = str(error).partition(" - at `$")
    place = where + re.sub(r"\[(\w+|\.\.\.)\]", r".\1", place.rstrip("`"))
    what = what.replace("`", "")
    return f"{place.strip('.') or 'the body'}: {what[:1].lower()}{what[1:]}"
