"""Do trainer and engine give the same tokens the same log-probabilities?

Measured at start and after every installation of weights: the engine samples a few short answers,
the trainer scores them. A gap beyond run.logprob_gap_limit stops the run, because GSPO's ratios
would be wrong by it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from gyre_megatron.engines.server import SglangServer
from gyre_megatron.errors import EngineError

if TYPE_CHECKING:
    from gyre_megatron.training import Trainer

PROMPT_TOKENS = 24
ANSWER_TOKENS = 12


class ParityCheck:
    """Compares log-probabilities of freshly sampled tokens.

    Args:
        num_sequences: how many answers are compared; 0 measures nothing and reports 0.
        vocab_size: prompts are drawn uniformly from it.
        seed: of the prompts.
    """

    def __init__(self, num_sequences: int, vocab_size: int, seed: int) -> None:
        draw = random.Random(seed)
        self._prompts = [
            [draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)
        ]

    def measure(self, trainer: Trainer, server: SglangServer | None) -> float:
        """Largest absolute difference in nats; called by all ranks of a cell, `server` on its
        leader only."""
        if not self._prompts:
            return 0.0
        message: list = [
            [self._sample(server, prompt) for prompt in self._prompts]
            if server is not None
            else None
        ]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(message, src=0)
        sampled = message[0]
        scored = trainer.score([ids for ids, _ in sampled], temperature=1.0)
        gaps = [
            np.abs(scores[PROMPT_TOKENS - 1 :] - np.asarray(engine)).max()
            for scores, (_, engine) in zip(scored, sampled, strict=True)
        ]
        return float(max(gaps))

    @staticmethod
    def _sample(server: SglangServer, prompt: list[int]) -> tuple[list[int], list[float]]:
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": ANSWER_TOKENS,
                "temperature": 1.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        answer = server.generate(body)
        pairs = answer["meta_info"].get("output_token_logprobs") or []
        if len(pairs) != ANSWER_TOKENS:
            raise EngineError(
                f"the engine returned {len(pairs)} log-probabilities for {ANSWER_TOKENS} sampled "
                "tokens"
            )
        return prompt + [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
