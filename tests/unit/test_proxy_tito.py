"""Token-in, token-out: in whatever form a harness echoes the history, the engine is fed stored ids
plus new ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.threaded import ThreadedProxy

TOOL = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
NUMBERS = itertools.count()


class NextAnswer:
    """A policy whose next answer is set by the test."""

    ids: tuple[int, ...] = ()

    def __call__(self, prompt: list[int]) -> tuple[int, ...]:
        return self.ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ThreadedProxy, NextAnswer]]:
    policy = NextAnswer()
    proxy = ThreadedProxy(tmp_path_factory.mktemp("proxy"), policy, template="qwen3")
    yield proxy, policy
    proxy.close()


# What the model samples: text, tool calls, reasoning, broken tags, and any token at all.
PIECES = st.sampled_from(
    [
        "Let me look.",
        "  spaced  ",
        "<think>\nhm\n</think>\n\n",
        '<tool_call>\n{"name": "look", "arguments": {"path": "a", "n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
        "<tool_call>\nbroken",
        "ünïcode 漢字",
        "\n\n",
    ]
)
ANSWERS = st.lists(st.one_of(PIECES, st.lists(st.integers(0, 511), max_size=6)), max_size=4)


def encode(proxy: ThreadedProxy, pieces: list[str | list[int]], ended: bool) -> tuple[int, ...]:
    tokens, end = proxy.proxy.renderer.tokens, proxy.proxy.renderer.turn_end_id
    ids = [i for p in pieces for i in (tokens.encode(p).tolist() if isinstance(p, str) else p)]
    return (*(i for i in ids if i != end), *([end] if ended or not ids else []))


class Talk:
    """A conversation in one dialect, echoed in a form that `rng` varies on every call."""

    def __init__(self, served: tuple[ThreadedProxy, NextAnswer], rng: random.Random) -> None:
        self.server, self.policy = served
        self.rng = rng
        number = next(NUMBERS)
        self.execution_id, self.token = self.server.proxy.start_execution(f"g{number}")
        self.turns: list[tuple[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(
            self.server.proxy.url + path, json=body, headers={"x-api-key": self.token}
        )
        assert response.status_code == 200, response.text
        return response.json()

    def call(self, text: str, answer: tuple[int, ...]) -> None:
        self.turns.append(("user", text))
        self.policy.ids = answer
        self.turns.append(("assistant", self.send()))
        for call_id in self.call_ids(self.turns[-1][1]):
            self.turns.append(("tool", (call_id, f"result of {text}")))

    def answer(self) -> Any:
        return next(content for role, content in reversed(self.turns) if role == "assistant")

    def maybe(self) -> bool:
        return self.rng.random() < 0.5

    def shuffled(self, value: dict[str, Any]) -> dict[str, Any]:
        items = list(value.items())
        self.rng.shuffle(items)
        return dict(items)


class AnthropicTalk(Talk):
    def text(self, text: str) -> Any:
        block = {
            "type": "text",
            "text": text,
            **({"cache_control": {"type": "ephemeral"}} if self.maybe() else {}),
        }
        return text if self.maybe() else [self.shuffled(block)]

    def send(self) -> Any:
        messages = []
        for role, content in self.turns:
            if role == "user":
                messages.append({"role": "user", "content": self.text(content)})
            elif role == "tool":
                result = {
                    "type": "tool_result",
                    "tool_use_id": content[0],
                    "content": self.text(content[1]),
                }
                if messages[-1]["role"] == "user":
                    messages[-1]["content"].append(result)
                else:
                    messages.append({"role": "user", "content": [result]})
            else:
                messages.append({"role": "assistant", "content": self.echo(content)})
        system = [{"type": "text", "text": f"x-anthropic-billing-header: v={self.rng.random()};"}]
        system.append({"type": "text", "text": "Be exact."})
        tool = {"name": "look", "input_schema": TOOL["parameters"]}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {
            "model": "m",
            "max_tokens": 400,
            "system": system,
            "messages": messages,
            "tools": [self.shuffled(tool)],
        }
        return self.post("/v1/messages?beta=true", {**body, "thinking": thinking, "unknown": 1})[
            "content"
        ]

    def echo(self, blocks: list[dict[str, Any]]) -> Any:
        kept = [b for b in blocks if b["type"] != "thinking" or self.maybe()]
        if len(kept) == 1 and kept[0]["type"] == "text" and self.maybe():
            return kept[0]["text"].strip()
        if not kept:
            return self.rng.choice([[], "", "(no content)", [{"type": "text", "text": ""}]])
        return [
            self.shuffled(
                dict(b, input=self.shuffled(b["input"])) if b["type"] == "tool_use" else b
            )
            for b in kept
        ]

    def call_ids(self, blocks: list[dict[str, Any]]) -> list[str]:
        return [b["id"] for b in blocks if b["type"] == "tool_use"]


class ChatTalk(Talk):
    def send(self) -> Any:
        messages: list[dict[str, Any]] = [
            {"role": self.rng.choice(["system", "developer"]), "content": "Be exact."}
        ]
        for role, content in self.turns:
            if role == "user":
                shown = content if self.maybe() else [{"type": "text", "text": content}]
                messages.append({"role": "user", "content": shown})
            elif role == "tool":
                messages.append({"role": "tool", "tool_call_id": content[0], "content": content[1]})
            else:
                messages.append(self.echo(content))
        body = {
            "model": "m",
            "max_tokens": 400,
            "messages": messages,
            "tools": [{"type": "function", "function": TOOL}],
        }
        return self.post("/v1/chat/completions", body)["choices"][0]["message"]

    def echo(self, message: dict[str, Any]) -> dict[str, Any]:
        echoed = json.loads(json.dumps(message))
        if self.maybe():
            echoed.pop("reasoning_content", None)
        if not echoed["content"] and self.maybe():
            echoed["content"] = self.rng.choice([None, "", []])
        for call in echoed.get("tool_calls", []):
            arguments = self.shuffled(json.loads(call["function"]["arguments"]))
            call["function"]["arguments"] = json.dumps(arguments, indent=self.rng.choice([None, 2]))
        return self.shuffled(echoed)

    def call_ids(self, message: dict[str, Any]) -> list[str]:
        return [call["id"] for call in message.get("tool_calls", [])]


class ResponsesTalk(Talk):
    def send(self) -> Any:
        items: list[dict[str, Any]] = []
        for role, content in self.turns:
            if role == "user":
                shown = content if self.maybe() else [{"type": "input_text", "text": content}]
                items.append({"role": "user", "content": shown})
            elif role == "tool":
                items.append(
                    {"type": "function_call_output", "call_id": content[0], "output": content[1]}
                )
            else:
                items += [
                    self.echo(item)
                    for item in content
                    if item["type"] != "reasoning" or self.maybe()
                ]
        body = {
            "model": "m",
            "instructions": "Be exact.",
            "input": items,
            "tools": [{"type": "function", **TOOL}],
        }
        return self.post("/v1/responses", {**body, "max_output_tokens": 400})["output"]

    def echo(self, item: dict[str, Any]) -> dict[str, Any]:
        return self.shuffled(
            {k: v for k, v in item.items() if k not in ("status", "id") or self.maybe()}
        )

    def call_ids(self, items: list[dict[str, Any]]) -> list[str]:
        return [item["call_id"] for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize("dialect", [AnthropicTalk, ChatTalk, ResponsesTalk])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    answers=st.lists(st.tuples(ANSWERS, st.booleans()), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_every_prompt_continues_the_stored_ids(
    served: tuple[ThreadedProxy, NextAnswer], dialect: type[Talk], answers: list, seed: int
) -> None:
    proxy, _ = served
    talk = dialect(served, random.Random(seed))
    expected: list[int] = []
    for number, (pieces, ended) in enumerate(answers):
        talk.call(f"question {number}", encode(proxy, pieces, ended))
        prompt, output = proxy.engine.prompts[-1], proxy.engine.outputs[-1]
        assert prompt[: len(expected)] == expected
        assert len(prompt) > len(expected)
        if isinstance(talk, ResponsesTalk) and not any(
            i["type"] != "reasoning" for i in talk.answer()
        ):
            return  # an answer without a single visible item leaves nothing that a harness could echo
        expected = prompt + output
    assert len(proxy.proxy.store.calls(talk.execution_id)) == len(answers)
