"""Routed experts: rows land on the tokens they belong to, from the engine that sampled them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from gyre_megatron.config.rollout import RolloutConfig, SamplingConfig
from gyre_megatron.errors import EngineError
from gyre_megatron.trajectory.routed_experts import MISSING, RoutingShape
from tests.support.checkpoints import make_checkpoint
from tests.support.proxies import running_proxy
from tests.support.scripted_engine import ScriptedEngine, chain_policy

CONFIG = RolloutConfig(sampling=SamplingConfig(return_routed_experts=True))
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2}


def expected(start: int, end: int, version: int) -> list[int]:
    """What the scripted engine of a version reports for positions, layer 0, expert 0."""
    return [position * 10 + version for position in range(start, end)]


def test_rows_follow_the_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await ScriptedEngine(chain_policy(), version=1).start()
        async with running_proxy(tmp_path, [engine], config=CONFIG) as proxy:
            proxy.renderer.routing_shape = RoutingShape.from_config(EXPERTS)
            execution_id, token = proxy.start_execution()
            messages = [{"role": "user", "content": "hello"}]
            async with httpx.AsyncClient() as client:
                for _ in range(2):
                    body = {"model": "m", "max_tokens": 5, "messages": messages}
                    answer = await client.post(
                        f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": token}
                    )
                    messages += [{"role": "assistant", "content": answer.json()["content"]}]
                    messages += [{"role": "user", "content": "more"}]
            for node in proxy.store.nodes(execution_id):
                found = node.routed_experts[:, 0, 0].tolist()
                wanted = expected(node.start, node.end, 1)
                # A call's last token was never fed to the engine.
                assert found == ([*wanted[:-1], MISSING] if node.sampled else wanted)
                assert node.routed_experts.shape == (len(node.token_ids), 2, 2)
        await engine.stop()

    asyncio.run(main())


def test_a_moved_call_keeps_the_rows_of_the_engine_that_sampled(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [
            await ScriptedEngine(chain_policy(), version=v, token_delay_s=0.02).start()
            for v in (1, 2)
        ]
        async with running_proxy(tmp_path, engines, config=CONFIG) as proxy:
            proxy.renderer.routing_shape = RoutingShape.from_config(EXPERTS)
            proxy.router.set_serving(1, False)
            execution_id, token = proxy.start_execution()
            body = {
                "model": "m",
                "max_tokens": 20,
                "messages": [{"role": "user", "content": "hello"}],
            }
            async with httpx.AsyncClient(timeout=30) as client:
                post = client.post(
                    f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": token}
                )
                call = asyncio.create_task(post)
                await asyncio.sleep(0.2)
                proxy.router.set_serving(1, True)
                assert await proxy.router.drain(0) == 1
                assert (await call).status_code == 200
            node = proxy.store.nodes(execution_id)[-1]
            (_, first), (_, second) = node.versions
            assert first + second == 20 and first > 2 and second > 2
            switch = (
                node.start + node.num_context + first - 1
            )  # the input whose output the second engine sampled first
            wanted = expected(node.start, switch, 1) + expected(switch, node.end - 1, 2)
            assert node.routed_experts[:-1, 0, 0].tolist() == wanted
        for engine in engines:
            await engine.stop()

    asyncio.run(main())


def test_another_shape_is_refused() -> None:
    shape = RoutingShape(3, 1, 2)
    assert shape.rows(np.zeros(12, np.int32).tobytes()).shape == (2, 2, 2)
    with pytest.raises(EngineError, match="another model"):
        shape.rows(b"\0" * 28)


def test_models_without_experts_report_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    assert RoutingShape.from_config(json.loads((folder / "config.json").read_text())) is None
