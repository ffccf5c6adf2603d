"""What the store keeps of a call: its tokens as a node of the execution's forest, and its accounts.

Used by `call`. Invariant: a call is followed by later prompts only while its state is `complete`;
what a harness never saw is kept for the accounts and never trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.generate import TokenChunk
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import GyreError
from gyre_megatron.proxy.dialects.base import Answer, Dialect
from gyre_megatron.proxy.sessions import Session
from gyre_megatron.text.conversation import BadRequest, CallRequest, answer_key
from gyre_megatron.text.renderer import Prompt, Renderer
from gyre_megatron.trajectory.records import Call, CallState, Node
from gyre_megatron.trajectory.routed_experts import RouteRecorder
from gyre_megatron.trajectory.store import TrajectoryStore


@dataclass(frozen=True)
class CallContext:
    """Everything a call needs from its surroundings."""

    store: TrajectoryStore
    router: Router
    renderer: Renderer
    config: RolloutConfig


@dataclass(frozen=True)
class IncomingCall:
    """A request that will be served.

    Attributes:
        session: The attempt that asks, held in memory until the call has ended.
        call_id: 24 hexadecimal digits.
        call_role: main, main_summary, sub_agent, sub_agent_summary or auxiliary.
        retry_count: How often the client says it has asked the same before.
        meta: What the store keeps besides.
    """

    session: Session
    dialect: Dialect
    request: CallRequest
    prompt: Prompt
    call_id: str
    call_role: str
    retry_count: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sampled:
    """Columns of what the policy produced so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions

    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, count) runs."""
        runs: list[tuple[int, int]] = []
        for version in self.versions:
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + 1)
            else:
                runs.append((version, 1))
        return tuple(runs)


class CallRecorder:
    """Collects one call's tokens and puts them into forest and store, once.

    Args:
        answer: The answer as the harness sees it; read when the call is committed.
        sampling: The parameters that the engine was given.
    """

    def __init__(
        self, context: CallContext, call: IncomingCall, answer: Answer, sampling: dict[str, Any]
    ) -> None:
        self._store = context.store
        self._call = call
        self._answer = answer
        self._sampling = sampling
        self._forest = call.session.forest
        self._started = time.time()
        self._node: Node | None = None
        self._routes = self._route_recorder(context)
        self.sampled = Sampled()

    @property
    def committed(self) -> bool:
        """Whether the call is in the store."""
        return self._node is not None

    @property
    def routed_start(self) -> int | None:
        """First position whose experts the engine shall report; None if it need not."""
        return None if self._routes is None else self._routes.start

    def add(self, chunk: TokenChunk) -> None:
        """Take tokens of the policy."""
        self.sampled.add(chunk)
        if self._routes is not None and chunk.routed_experts is not None:
            self._routes.add(chunk.prompt_length, chunk.routed_experts)

    async def commit(self, state: CallState) -> None:
        """Hang the answer into the forest and wait until the store has it.

        Raises:
            BadRequest: the store could not take it.
        """
        node = self._make_node()
        nodes = [*self._forest.unsaved(self._call.prompt.parent), node]
        if self._routes is not None:
            self._routes.assign(nodes)
        if state == "complete":
            self._forest.add_sampled(node)
        self._node = node
        try:
            await asyncio.wrap_future(self._store.add_call(self._make_call(node, state), nodes))
        except GyreError as error:
            self._forest.forget_answer(node)
            raise BadRequest(f"the call could not be recorded: {error}", "internal", 500) from error
        for stored in nodes:
            stored.persisted = True
        if state == "complete" and self._call.retry_count > 0:
            await self._supersede(node)

    async def abandon(self) -> None:
        """The harness hung up, or the call failed: keep what was sampled for the accounts only."""
        if self.sampled.token_ids:
            with contextlib.suppress(BadRequest):
                # A hang-up cancels this task; the record must be written all the same.
                await asyncio.shield(self.commit("undelivered"))

    async def withdraw(self) -> None:
        """The harness hung up after the commit: nobody saw the end of this answer."""
        if self._node is not None:
            self._forest.forget_answer(self._node)
            await self._set_state([self._node], "undelivered")

    async def _supersede(self, node: Node) -> None:
        """The harness asked again: an earlier answer to the same prompt that it never built on must
        not train."""
        older = self._forest.siblings_sampled_from(self._call.prompt.parent, node)
        for other in older:
            self._forest.forget_answer(other)
        if older:
            await self._set_state(older, "superseded")

    async def _set_state(self, nodes: list[Node], state: CallState) -> None:
        call_ids = [node.call_id for node in nodes]
        await asyncio.wrap_future(self._store.set_call_state(call_ids, state))

    def _route_recorder(self, context: CallContext) -> RouteRecorder | None:
        shape = context.renderer.routing_shape
        if not context.config.sampling.return_routed_experts or shape is None:
            return None
        parent = self._call.prompt.parent
        new = self._forest.unsaved(parent)
        return RouteRecorder(shape, new[0].start if new else parent.end)

    def _make_node(self) -> Node:
        prompt = self._call.prompt
        sampled = self.sampled
        tools = [(call.name, call.arguments) for call in self._answer.tool_calls]
        return Node(
            node_id=self._store.new_node_id(),
            parent=prompt.parent.node_id,
            key=answer_key(prompt.prefill + self._answer.text, tools),
            token_ids=np.concatenate([prompt.lead, np.asarray(sampled.token_ids, np.int32)]),
            num_context=len(prompt.lead),
            logprobs=np.asarray(sampled.logprobs, np.float32),
            versions=sampled.version_runs(),
            temperature=self._sampling["temperature"],
            call_id=self._call.call_id,
            start=prompt.parent.end,
        )

    def _make_call(self, node: Node, state: CallState) -> Call:
        call = self._call
        return Call(
            call_id=call.call_id,
            execution_id=call.session.execution_id,
            attempt=call.session.attempt,
            node_id=node.node_id,
            dialect=call.request.dialect,
            role=call.call_role,
            state=state,
            finish_reason=self._answer.finish_reason,
            num_prompt_tokens=len(call.prompt.token_ids),
            num_reused_tokens=call.prompt.num_reused,
            num_output_tokens=len(self.sampled.token_ids),
            started_at=self._started,
            finished_at=time.time(),
            meta={**call.meta, "retry_count": call.retry_count, "sampling": self._sampling},
        )
