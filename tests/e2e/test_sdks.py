"""The official anthropic and openai clients, streaming and not, against the proxy with a scripted
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import anthropic
import openai
import pytest

from gyre_megatron.config.rollout import ProxyConfig, RolloutConfig
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.replay import assert_replays
from tests.support.scripted_agents import ScriptedAgent, tool_call
from tests.support.scripted_engine import ScriptedEngine

CALL = "Let me see.\n" + tool_call("add", a=2, b=3) + "\n" + tool_call("add", a=4, b=5)
ANSWER = "<think>\nsums\n</think>\n\nIt is 5 and 9."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def add_agent(text: str, last: str) -> str:
    """Calls a tool twice, then answers."""
    return ANSWER if "<tool_response>" in last else CALL


def drive(
    folder: Path,
    body: Callable[[RunningProxy, str], Awaitable[None]],
    context_length: int = 8192,
    replays: bool = True,
    template: str = "chatml",
    answer: Callable[[str, str], str] = add_agent,
    **engine: float,
) -> None:
    """Serve the tool-calling script, run `body(proxy, token)`, check that every token replays."""

    async def main() -> None:
        agent = ScriptedAgent(answer)
        server = await ScriptedEngine(agent, version=2, **engine).start()
        config = RolloutConfig(proxy=ProxyConfig(ping_interval_s=0.05))
        async with running_proxy(folder, [server], template, config, context_length) as proxy:
            agent.renderer = proxy.renderer
            execution_id, token = proxy.start_execution()
            await body(proxy, token)
            if replays:
                assert_replays(proxy.store, execution_id, server)
            calls = proxy.store.calls(execution_id)
            assert all(call.num_reused_tokens > 0 for call in calls if call.finish_reason == "stop")
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(tmp_path: Path, stream: bool) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
        tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
        common = {"model": "m", "max_tokens": 500, "system": "Be exact.", "tools": tools}
        common["thinking"] = {"type": "enabled", "budget_tokens": 100}

        async def create(messages: list) -> anthropic.types.Message:
            if not stream:
                return await client.messages.create(messages=messages, **common)
            async with client.messages.stream(messages=messages, **common) as events:
                return await events.get_final_message()

        messages: list = [{"role": "user", "content": "2+3, 4+5"}]
        first = await create(messages)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert first.content[0].text == "Let me see."
        assert [block.input for block in first.content[1:]] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
        assert first.stop_reason == "tool_use"
        # Echo it as a harness does: extra fields, blocks in place of strings, cache_control on the
        # last block.
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "5"}]}
            for b in first.content[1:]
        ]
        results[-1]["cache_control"] = {"type": "ephemeral"}
        messages[0]["content"] = [
            {"type": "text", "text": "2+3, 4+5", "cache_control": {"type": "ephemeral"}}
        ]
        messages += [{"role": "assistant", "content": [b.model_dump() for b in first.content]}]
        messages += [{"role": "user", "content": results}]
        second = await create(messages)
        assert [block.type for block in second.content] == ["thinking", "text"]
        assert (
            second.content[0].thinking.strip() == "sums"
            and second.content[1].text == "It is 5 and 9."
        )
        assert second.stop_reason == "end_turn"
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        count = await client.messages.count_tokens(
            model="m", system="Be exact.", tools=tools, messages=messages
        )
        assert count.input_tokens == second.usage.input_tokens

    drive(tmp_path, body, token_delay_s=0.002)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(tmp_path: Path, stream: bool) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=token)
        tools = [
            {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
        ]

        async def create(messages: list) -> openai.types.chat.ChatCompletion:
            if not stream:
                return await client.chat.completions.create(
                    model="m", messages=messages, tools=tools
                )
            async with client.chat.completions.stream(
                model="m", messages=messages, tools=tools
            ) as events:
                async for _ in events:
                    pass
                return await events.get_final_completion()

        messages: list = [
            {"role": "system", "content": "Be exact."},
            {"role": "user", "content": "2+3, 4+5"},
        ]
        first = (await create(messages)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "Let me see."
        assert [call.function.arguments for call in first.message.tool_calls] == [
            '{"a": 2, "b": 3}',
            '{"a": 4, "b": 5}',
        ]
        # Arguments come back in another form; the reasoning never comes back.
        echoed = first.message.model_dump(exclude_none=True, exclude={"parsed"})
        for call in echoed["tool_calls"]:
            call["function"] = {
                "name": "add",
                "arguments": call["function"]["arguments"].replace(" ", ""),
            }
        messages += [echoed]
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in echoed["tool_calls"]
        ]
        second = (await create(messages)).choices[0]
        assert second.message.content == "It is 5 and 9." and second.finish_reason == "stop"
        messages += [
            {"role": "assistant", "content": "It is 5 and 9."},
            {"role": "user", "content": "And now?"},
        ]
        third = (await create(messages)).choices[0]
        assert third.finish_reason == "tool_calls"
        assert len(await _model_ids(client)) == 1

    drive(tmp_path, body)


async def _model_ids(client: openai.AsyncOpenAI) -> list[str]:
    return [model.id async for model in client.models.list()]


@pytest.mark.parametrize("stream", [False, True])
def test_responses(tmp_path: Path, stream: bool) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=token)
        tools = [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "web_search"}]

        async def create(items: list) -> openai.types.responses.Response:
            common = {
                "model": "m",
                "instructions": "Be exact.",
                "input": items,
                "tools": tools,
                "store": False,
            }
            if not stream:
                return await client.responses.create(**common)
            async with client.responses.stream(**common) as events:
                async for _ in events:
                    pass
                return await events.get_final_response()

        items: list = [{"role": "user", "content": "2+3, 4+5"}]
        first = await create(items)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert (
            first.output_text == "Let me see." and first.output[1].arguments == '{"a": 2, "b": 3}'
        )
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": i.call_id, "output": "5"}
            for i in first.output[1:]
        ]
        second = await create(items)
        assert [item.type for item in second.output] == ["reasoning", "message"]
        assert second.output_text == "It is 5 and 9." and second.status == "completed"
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens

    drive(tmp_path, body)


def test_xml_tool_calls_take_the_types_of_the_schema(tmp_path: Path) -> None:
    calls = "".join(
        f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=note>\n{note}\n</parameter>\n"
        "</function>\n</tool_call>\n"
        for a, note in ((2, "12"), (3, "two\nlines"))
    )

    async def body(proxy: RunningProxy, token: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
        properties = {"a": {"type": "integer"}, "note": {"type": "string"}}
        tools = [{"name": "add", "input_schema": {"type": "object", "properties": properties}}]
        messages: list = [{"role": "user", "content": "add"}]
        first = await client.messages.create(
            model="m", max_tokens=500, tools=tools, messages=messages
        )
        assert [b.input for b in first.content] == [
            {"a": 2, "note": "12"},
            {"a": 3, "note": "two\nlines"},
        ]
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": "ok"} for b in first.content
        ]
        messages += [{"role": "assistant", "content": [b.model_dump() for b in first.content]}]
        messages += [{"role": "user", "content": results}]
        second = await client.messages.create(
            model="m", max_tokens=500, tools=tools, messages=messages
        )
        assert second.content[0].text == "done"

    drive(
        tmp_path,
        body,
        template="qwen3_coder",
        answer=lambda text, last: "done" if "<tool_response>" in last else calls,
    )


def test_overflow_is_told_in_each_dialects_own_form(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        long = "word " * 2000
        claude = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 512 maximum"
        ):
            await claude.messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": long}]
            )
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=token)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": long}]
            )
        assert caught.value.code == "context_length_exceeded"
        events = [
            e async for e in await client.responses.create(model="m", input=long, stream=True)
        ]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "context_length_exceeded"

    drive(tmp_path, body, context_length=512)


def test_limits_and_stop_strings(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
        messages = [{"role": "user", "content": "2+3"}]
        cut = await client.messages.create(model="m", max_tokens=3, messages=messages)
        assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
        stopped = await client.messages.create(
            model="m", max_tokens=99, stop_sequences=["me"], messages=messages
        )
        assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "me"
        assert stopped.content[0].text == "Let "

    # The scripted engine knows no stop strings: the proxy ends the call, and the engine may be
    # ahead of the store.
    drive(tmp_path, body, replays=False)


def test_refusals_name_the_fault(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = anthropic.AsyncAnthropic(
            base_url=proxy.url, auth_token=token, api_key=None, max_retries=0
        )
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        content = [{"type": "image", "source": source}]
        with pytest.raises(
            anthropic.BadRequestError, match="reads text only; leave out the image block"
        ):
            await client.messages.create(
                model="m", max_tokens=3, messages=[{"role": "user", "content": content}]
            )
        stranger = anthropic.AsyncAnthropic(
            base_url=proxy.url, auth_token="wrong", api_key=None, max_retries=0
        )
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(
                model="m", max_tokens=3, messages=[{"role": "user", "content": "x"}]
            )
        other = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await other.responses.create(model="m", input="x")

    drive(tmp_path, body)


def test_a_slow_engine_is_covered_by_pings(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, token: str) -> None:
        client = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
        messages = [{"role": "user", "content": "2+3"}]
        async with client.messages.with_streaming_response.create(
            model="m", max_tokens=2, messages=messages, stream=True
        ) as response:
            text = await response.text()
        assert text.count("event: ping") >= 5
        assert text.index("event: message_start") < text.index("event: content_block_start")

    drive(tmp_path, body, token_delay_s=0.25)
