"""Units to token ids through the model's own chat template; only new units are ever rendered.

The renderer knows the template's pieces and the tokenizer; `extend` hangs what is new under the
forest.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gyre_megatron.config.rollout import ProxyConfig
from gyre_megatron.errors import TemplateError
from gyre_megatron.text.chat_template import ChatTemplate
from gyre_megatron.text.conversation import Unit
from gyre_megatron.text.output_parser import THINK_CLOSE, THINK_OPEN
from gyre_megatron.text.template_proof import prove_or_degrade
from gyre_megatron.text.token_text import TokenText
from gyre_megatron.text.tool_formats import ToolFormat, load_tool_format
from gyre_megatron.trajectory.forest import Forest
from gyre_megatron.trajectory.records import Node
from gyre_megatron.trajectory.routed_experts import RoutingShape

log = logging.getLogger(__name__)

_LONG_TEXT = 100_000  # characters: about 20 ms of encoding
_UNKNOWN_CONTEXT = 32_768


@dataclass(frozen=True)
class Prompt:
    """What a call is fed.

    Attributes:
        parent: The last context node; the answer hangs under it.
        lead: int32 [k], generation prompt (and prefilled answer): the sampled node's context
            tokens.
        token_ids: int32 [n], the whole prompt with `lead`.
        num_reused: Tokens that came from the forest.
        prefill: Text that the harness began the answer with.
        opens_thinking: Whether the prompt has opened a <think> block that the answer will close.
    """

    parent: Node
    lead: np.ndarray
    token_ids: np.ndarray
    num_reused: int
    prefill: str = ""
    opens_thinking: bool = False


class Renderer:
    """Chat template, tokenizer and tool format of one model.

    Args:
        template: The model's chat template.
        tokens: Its tokenizer.
        tool_format: How the model writes tool calls; None leaves them as text.
        context_length: Tokens of prompt and answer together.
        routing_shape: How the engine reports routed experts; None for a model without experts.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokens: TokenText,
        tool_format: ToolFormat | None = None,
        context_length: int = 32_768,
        routing_shape: RoutingShape | None = None,
    ) -> None:
        self.template = template
        self.tokens = tokens
        self.context_length = context_length
        self.routing_shape = routing_shape
        self.tool_format = tool_format
        self._close_ids = tokens.encode(template.turn_close)
        if not len(self._close_ids) or int(self._close_ids[0]) not in tokens.special_ids:
            raise TemplateError(
                f"chat template {template.name}: a turn is closed by {template.turn_close!r}, "
                "which does not begin with a special token of the tokenizer; the end of an answer "
                "could not be told from its text"
            )
        self.turn_end_id = int(self._close_ids[0])
        self._leads: dict[str, np.ndarray] = {}

    @classmethod
    def from_checkpoint(cls, path: str | Path, config: ProxyConfig) -> Renderer:
        """Read template, tokenizer and context length of a Hugging Face checkpoint.

        Raises:
            TemplateError: it cannot be rendered incrementally, with the reason.
            ConfigError: the tool format cannot be loaded.
        """
        template = ChatTemplate.from_checkpoint(path, config.chat_template_kwargs)
        model = _model_config(Path(path))
        length = config.context_length or _own_context_length(model)
        tokens = TokenText(path)
        try:
            proof = prove_or_degrade(template, tokens)
            log.info(
                "chat template %s: %d conversations rendered incrementally",
                template.name,
                proof.num_conversations,
            )
        except TemplateError as error:
            if not config.unproven_template:
                raise
            log.warning("serving an unproven chat template: %s", error)
        return cls(
            template,
            tokens,
            load_tool_format(config.tool_call_format, template.source),
            length,
            RoutingShape.from_config(model),
        )

    async def extend_long(self, forest: Forest, units: list[Unit]) -> Prompt:
        """As `extend`, but long new text is encoded in a thread: other calls go on meanwhile."""
        match = forest.match([(unit.key, unit.provenance) for unit in units])
        new = [index for index in range(match.num_units, len(units)) if not units[index].provenance]
        texts = {index: self._text(units[index], _kind_before(units, index)) for index in new}
        if sum(map(len, texts.values())) < _LONG_TEXT:
            return self.extend(forest, units)
        encoded = await asyncio.to_thread(
            lambda: {i: self.tokens.encode(text) for i, text in texts.items()}
        )
        return self.extend(forest, units, encoded)

    def extend(
        self, forest: Forest, units: list[Unit], encoded: Mapping[int, np.ndarray] | None = None
    ) -> Prompt:
        """Follow the forest as far as it goes and hang the units that are new.

        Args:
            encoded: Ids of units that were encoded beforehand, by position.
        """
        units, prefill = self._split_prefill(units)
        match = forest.match([(unit.key, unit.provenance) for unit in units])
        node = match.node
        reused = node.end if node else 0
        for index in range(match.num_units, len(units)):
            node = self._add(forest, node, units, index, encoded or {})
        previous = self._previous(units[-1].kind)
        lead = self._lead(previous)
        if prefill:
            lead = np.concatenate([lead, self.tokens.encode(prefill)])
        if node is None:
            raise TemplateError("a prompt without a single unit cannot be rendered")
        asks = self.template.generation_prompt(previous)
        opens = not prefill and asks.rfind(THINK_OPEN) > asks.rfind(THINK_CLOSE)
        return Prompt(
            node, lead, np.concatenate([forest.path_ids(node), lead]), reused, prefill, opens
        )

    def _lead(self, previous: str) -> np.ndarray:
        if previous not in self._leads:
            self._leads[previous] = self.tokens.encode(self.template.generation_prompt(previous))
        return self._leads[previous]

    def _previous(self, kind: str) -> str:
        """The role the template saw: system messages it does not take in mid-list are shown to it
        as user messages."""
        return "user" if kind == "system" and not self.template.supports_mid_system else kind

    def _split_prefill(self, units: list[Unit]) -> tuple[list[Unit], str]:
        last = units[-1]
        if (
            last.kind == "assistant"
            and not last.messages[0].get("tool_calls")
            and not last.provenance
        ):
            return units[:-1], last.messages[0]["content"]
        return units, ""

    def _add(
        self,
        forest: Forest,
        parent: Node | None,
        units: list[Unit],
        index: int,
        encoded: Mapping[int, np.ndarray],
    ) -> Node:
        unit = units[index]
        # Another call of this prompt may have hung the unit meanwhile, and a later unit may meet an
        # older path again.
        existing = forest.child(parent, unit.key)
        if existing is not None:
            return existing
        for call_id in unit.provenance:
            known = forest.sampled_by(call_id)
            if known is not None:
                ids = np.concatenate([known.token_ids, self._closing(known)])
                return forest.add_context(parent, unit.key, ids)
        early = encoded.get(index)
        ids = (
            self.tokens.encode(self._text(unit, _kind_before(units, index)))
            if early is None
            else early
        )
        if parent is not None and parent.sampled:
            ids = np.concatenate([self._closing(parent), ids])
        return forest.add_context(parent, unit.key, ids)

    def _text(self, unit: Unit, previous: str) -> str:
        if unit.kind == "head":
            return self.template.head(unit.messages, unit.tools)
        messages = unit.messages
        if unit.kind == "system" and not self.template.supports_mid_system:
            messages = (
                {"role": "user", "content": f"<system>\n{messages[0]['content']}\n</system>"},
            )
        return self.template.unit_text(self._previous(previous), messages)

    def _closing(self, answer: Node) -> np.ndarray:
        """Ids that close a turn the policy may have ended itself."""
        ended = len(answer.token_ids) and int(answer.token_ids[-1]) == self.turn_end_id
        return self._close_ids[1:] if ended else self._close_ids


def _model_config(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TemplateError(
            f"{file} cannot be read ({error}); expected a checkpoint in Hugging Face format"
        ) from None


def _own_context_length(model: Mapping[str, Any]) -> int:
    """What the model was trained for; models that see pictures keep it in their text part."""
    text = model.get("text_config") or {}
    length = model.get("max_position_embeddings") or text.get("max_position_embeddings")
    return length or _UNKNOWN_CONTEXT


def _kind_before(units: list[Unit], index: int) -> str:
    return units[index - 1].kind if index else "head"
