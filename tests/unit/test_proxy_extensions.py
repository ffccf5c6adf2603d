"""What users bring to the proxy: every hook's contract, and an own dialect, profile and tool format
at work."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_megatron.config.rollout import ProxyConfig, RolloutConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.proxy.call_roles import CALL_ROLE_PROFILES, CALL_ROLES
from gyre_megatron.proxy.dialects.base import Dialect
from gyre_megatron.proxy.extensions import DIALECTS, load_extensions
from gyre_megatron.text.tool_formats import TOOL_FORMATS, ToolFormat, load_tool_format
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.scripted_agents import ScriptedAgent
from tests.support.scripted_engine import ScriptedEngine

EXTENSIONS = '''
import json
from gyre_megatron.proxy.dialects.base import Answer, Dialect
from gyre_megatron.text.conversation import BadRequest, CallRequest


class Plain(Dialect):
    """One line in, one line out."""

    name = "plain"
    paths = ("/plain",)

    def parse(self, body):
        text = json.loads(body).get("say")
        if not isinstance(text, str):
            raise BadRequest("say: expected text")
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        return CallRequest("plain", "m", [{"role": "user", "content": text}], tools)

    def writer(self, request, answer):
        raise NotImplementedError

    def body(self, request, answer):
        return {"said": answer.text, "calls": [call.name for call in answer.tool_calls]}

    def error(self, error):
        return {"refused": str(error)}


class Unfinished(Dialect):
    name = "unfinished"
    paths = ("/unfinished",)


class Nameless(Plain):
    name = ""


class Copy(Plain):
    name = "copy"


def loud(request, headers):
    return "sub_agent" if request.messages[0]["content"].isupper() else "main"


def confused(request, headers):
    return "boss"


class Brackets:
    open_tag = "[["
    close_tag = "]]"

    def parse(self, body, tools):
        return [(name, {}) for name in body.split(",")]


def brackets(template_source):
    return Brackets()


def no_format(template_source):
    return "hermes"


def needs_more(one, two, three):
    return None
'''


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(EXTENSIONS)
    return str(file)


def test_every_hook_of_ours_fills_its_contract() -> None:
    for point in (DIALECTS, CALL_ROLE_PROFILES, TOOL_FORMATS):
        assert point.builtin
        for name in point.builtin:
            hook = point.load(name)
            inspect.signature(hook).bind(*point.parameters)
    assert all(isinstance(DIALECTS.load(name)(), Dialect) for name in DIALECTS.builtin)
    made = [TOOL_FORMATS.load(name)("<tool_call>") for name in TOOL_FORMATS.builtin]
    assert all(format_ is None or isinstance(format_, ToolFormat) for format_ in made)
    assert set(TOOL_FORMATS.builtin) == {"auto", "none", "hermes", "qwen3_coder"}


def test_the_contracts_are_pinned() -> None:
    assert (DIALECTS.key, DIALECTS.parameters) == ("rollout.proxy.dialects", ())
    assert CALL_ROLE_PROFILES.key == "rollout.proxy.harness_profile"
    assert CALL_ROLE_PROFILES.parameters == ("request", "headers")
    assert TOOL_FORMATS.key == "rollout.proxy.tool_call_format"
    assert TOOL_FORMATS.parameters == ("template_source",)
    assert Dialect.__abstractmethods__ == {"parse", "writer", "body", "error"}
    assert list(inspect.signature(ToolFormat.parse).parameters) == ["self", "body", "tools"]
    assert len(CALL_ROLES) == 5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dialects", ["antropic"], "did you mean anthropic"),
        ("dialects", ["{}:Unfinished"], "no dialect yet: .*parse"),
        ("dialects", ["{}:Nameless"], "does not set name"),
        ("dialects", ["{}:Plain", "{}:Copy"], "serve /plain twice"),
        ("dialects", ["chat", "chat"], "twice"),
        ("dialects", ["{}:needs_more"], r"cannot be called as \(\)"),
        ("dialects", ["no_such_module:Plain"], "cannot be imported"),
        ("harness_profile", "claude_cod", "did you mean claude_code"),
        ("harness_profile", "{}:needs_more", r"cannot be called as \(request, headers\)"),
        ("harness_profile", "{}:lout", "did you mean .*:loud"),
        ("tool_call_format", "hermess", "did you mean hermes"),
        ("tool_call_format", "{}:needs_more", r"cannot be called as \(template_source\)"),
    ],
)
def test_wrong_hooks_are_refused_before_anything_starts(
    hooks: str, field: str, value: Any, message: str
) -> None:
    named = [v.format(hooks) for v in value] if isinstance(value, list) else value.format(hooks)
    with pytest.raises(ConfigError, match=rf"rollout\.proxy\.{field}.*{message}") as caught:
        load_extensions(ProxyConfig(**{field: named}))
    assert "\n" not in str(caught.value)


def test_a_format_maker_that_makes_none_is_refused(hooks: str) -> None:
    with pytest.raises(ConfigError, match="returned a str; expected an object with open_tag"):
        load_tool_format(f"{hooks}:no_format", "")


def serve(
    folder: Path, config: ProxyConfig, body: Callable[[RunningProxy, str], Awaitable[None]]
) -> None:
    """Run `body(proxy, token)`; the engine always says `ok [[look]]`."""

    async def main() -> None:
        agent = ScriptedAgent(lambda text, last: "ok [[look]]")
        engine = await ScriptedEngine(agent).start()
        async with running_proxy(folder, [engine], config=RolloutConfig(proxy=config)) as proxy:
            agent.renderer = proxy.renderer
            await body(proxy, proxy.start_execution()[1])
        await engine.stop()

    asyncio.run(main())


def test_own_dialect_profile_and_tool_format_at_work(tmp_path: Path, hooks: str) -> None:
    config = ProxyConfig(
        dialects=[f"{hooks}:Plain", "chat"],
        harness_profile=f"{hooks}:loud",
        tool_call_format=f"{hooks}:brackets",
    )

    async def body(proxy: RunningProxy, token: str) -> None:
        async with httpx.AsyncClient(
            base_url=proxy.url, headers={"x-api-key": token}, timeout=60
        ) as client:
            for text in ("hello", "HELLO"):
                answer = await client.post("/plain", json={"say": text})
                assert answer.json() == {"said": "ok", "calls": ["look"]}
            refused = await client.post("/plain", json={"say": 1})
            assert (refused.status_code, refused.json()) == (400, {"refused": "say: expected text"})
            assert (await client.get("/plain")).json().keys() == {"refused"}
            assert (await client.post("/v1/messages", json={})).status_code == 404
            published = (await client.get("/openapi.json")).json()["paths"]
            assert "/plain" in published and "/v1/messages" not in published
        calls = proxy.store.calls("g.00")
        assert [(call.dialect, call.role) for call in calls] == [
            ("plain", "main"),
            ("plain", "sub_agent"),
        ]

    serve(tmp_path, config, body)


def test_a_profile_that_gives_no_role_is_named(tmp_path: Path, hooks: str) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        message = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(
            base_url=proxy.url, headers={"x-api-key": token}, timeout=60
        ) as client:
            answer = await client.post("/v1/messages", json=message)
        assert answer.status_code == 400 and "role 'boss'; expected one of main" in answer.text

    serve(tmp_path, ProxyConfig(harness_profile=f"{hooks}:confused"), body)


LOST = [
    ("GET", "/v1/messages", {}, 405, "anthropic"),
    ("PUT", "/v1/messages/count_tokens", {}, 405, "anthropic"),
    ("POST", "/v1/messages/batches", {}, 404, "anthropic"),
    ("POST", "/v1/complete", {"anthropic-version": "2023-06-01"}, 404, "anthropic"),
    ("GET", "/v1/chat/completions", {}, 405, "openai"),
    ("GET", "/v1/responses", {}, 405, "openai"),
    ("POST", "/v1/embeddings", {}, 404, "openai"),
]


def test_lost_requests_are_told_in_the_form_of_their_client(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as client:
            for method, path, headers, status, form in LOST:
                answer = await client.request(method, path, headers=headers)
                said = answer.json()
                assert answer.status_code == status
                assert f"{method} {path} is not served; POST to one of" in said["error"]["message"]
                assert (said.get("type") == "error") == (form == "anthropic")
                assert said["error"]["type"] in ("not_found_error", "invalid_request_error")
            assert (await client.get("/favicon.ico")).json() == {"detail": "Not Found"}

    serve(tmp_path, ProxyConfig(), body)
