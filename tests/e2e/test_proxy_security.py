"""Strangers, neighbours, oversized and senseless requests: refused in the dialect's form, and
nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gyre_megatron.config.rollout import ProxyConfig, RolloutConfig, SamplingConfig
from gyre_megatron.trajectory.records import Outcome
from tests.support.scripted_engine import chain_policy
from tests.support.threaded import ThreadedProxy

ENDPOINTS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/v1/responses")
MESSAGE = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}

# No shrinking: a request that fails is small enough to read, and shrinking over HTTP takes minutes.
FUZZ = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedProxy]:
    config = RolloutConfig(
        proxy=ProxyConfig(max_request_mib=1),
        # The scripted policy never stops by itself, and generated requests ask for billions.
        sampling=SamplingConfig(max_new_tokens=8),
    )
    server = ThreadedProxy(tmp_path_factory.mktemp("proxy"), chain_policy(), config=config)
    yield server
    server.close()


@pytest.fixture(scope="module")
def token(server: ThreadedProxy) -> str:
    return server.proxy.start_execution("fuzz")[1]


def post(server: ThreadedProxy, path: str, token: str | None, **request: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.post(
        server.proxy.url + path, headers={"content-type": "application/json", **headers}, **request
    )


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("token", [None, "wrong", "gyre-", "gyre-ünïcode"])
def test_strangers_get_401_and_touch_nothing(
    server: ThreadedProxy, path: str, token: str | None
) -> None:
    prompts = len(server.engine.prompts)
    headers = {"authorization": f"Bearer {token}".encode()} if token is not None else {}
    response = httpx.post(server.proxy.url + path, headers=headers, content=b"not even JSON")
    assert response.status_code == 401
    assert "no running execution" in response.text
    assert len(server.engine.prompts) == prompts


def test_a_token_dies_with_its_execution(server: ThreadedProxy) -> None:
    execution_id, token = server.proxy.start_execution("short")
    assert post(server, "/v1/messages", token, json=MESSAGE).status_code == 200
    server.proxy.store.finish_execution(execution_id, Outcome("scored", 1.0))
    assert post(server, "/v1/messages", token, json=MESSAGE).status_code == 401
    assert len(server.proxy.store.calls(execution_id)) == 1


def test_one_execution_cannot_read_or_extend_anothers_tree(server: ThreadedProxy) -> None:
    mine, my_token = server.proxy.start_execution("mine")
    yours, your_token = server.proxy.start_execution("yours")
    answer = post(server, "/v1/messages", my_token, json=MESSAGE).json()
    before = [(n.node_id, n.token_ids.tolist()) for n in server.proxy.store.nodes(mine)]
    # The other execution names my call by its id and repeats my history word for word.
    tool = {"type": "tool_use", "id": f"toolu_{answer['id'][4:]}_0", "name": "x", "input": {}}
    stolen = [*MESSAGE["messages"], {"role": "assistant", "content": [*answer["content"], tool]}]
    body = {**MESSAGE, "messages": [*stolen, {"role": "user", "content": "more"}]}
    assert post(server, "/v1/messages", your_token, json=body).status_code == 200
    assert [(n.node_id, n.token_ids.tolist()) for n in server.proxy.store.nodes(mine)] == before
    call = server.proxy.store.calls(yours)[0]
    assert call.num_reused_tokens == 0
    sampled = [n for n in server.proxy.store.nodes(yours) if n.sampled]
    assert [n.call_id for n in sampled] == [call.call_id]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_oversized_bodies_are_refused(server: ThreadedProxy, token: str, path: str) -> None:
    body = json.dumps({**MESSAGE, "junk": "x" * (2 << 20)}).encode()
    assert post(server, path, token, content=body).status_code == 413

    def chunks() -> Iterator[bytes]:
        yield body  # no content-length: found out while reading

    assert post(server, path, token, content=chunks()).status_code == 413


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 5000]
)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_no_json_object_is_a_400(
    server: ThreadedProxy, token: str, path: str, body: bytes
) -> None:
    response = post(server, path, token, content=body)
    assert response.status_code == 400 and "error" in response.json()


def test_compressed_bodies_are_refused(server: ThreadedProxy, token: str) -> None:
    headers = {"authorization": f"Bearer {token}", "content-encoding": "gzip"}
    assert (
        httpx.post(f"{server.proxy.url}/v1/messages", headers=headers, content=b"x").status_code
        == 415
    )


def test_deep_and_strange_values_do_no_harm(server: ThreadedProxy, token: str) -> None:
    deep: Any = "end"
    for _ in range(200):
        deep = {"a": [deep]}
    tools = [{"name": "t", "input_schema": {"type": "object", "properties": {"x": deep}}}]
    assert post(server, "/v1/messages", token, json={**MESSAGE, "tools": tools}).status_code == 400
    lone = b'{"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert post(server, "/v1/messages", token, content=lone).status_code in (200, 400)
    huge = b'{"model": "m", "max_tokens": 99999999999999999999, "messages": [{"role": "user", "content": "x"}]}'
    assert post(server, "/v1/messages", token, content=huge).status_code == 400


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


KEYS = words(
    "model messages input role content type text tools tool_calls function arguments name id "
    "max_tokens stop system "
    "tool_use_id tool_call_id call_id output instructions thinking stream_options temperature "
    "input_schema"
)
WORDS = words(
    "user assistant system tool text tool_use tool_result image function_call custom message"
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(FUZZ, max_examples=80)
@given(body=st.dictionaries(KEYS, JSON, max_size=6), messages=st.lists(JSON, max_size=3))
def test_fuzzing_finds_no_500(
    server: ThreadedProxy, token: str, path: str, body: dict, messages: list
) -> None:
    body = {
        **body,
        "messages": messages,
        "input": messages,
        "max_tokens": 3,
        "max_output_tokens": 3,
        "stream": False,
    }
    response = post(server, path, token, content=json.dumps(body).encode())
    assert response.status_code < 500, response.text


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/models/{name}"])
def test_schemathesis_finds_no_500(server: ThreadedProxy, token: str, path: str) -> None:
    api = schemathesis.openapi.from_url(f"{server.proxy.url}/openapi.json")
    operation = next(op.ok() for op in api.get_all_operations() if op.ok().path == path)
    statuses: set[int] = set()

    @settings(FUZZ, max_examples=30)
    @given(case=operation.as_strategy())
    def requests(case: schemathesis.Case) -> None:
        response = case.call(headers={"authorization": f"Bearer {token}"})
        assert response.status_code < 500, response.text
        statuses.add(response.status_code)

    requests()
    assert 200 in statuses, f"not one of the generated requests was served: {statuses}"
