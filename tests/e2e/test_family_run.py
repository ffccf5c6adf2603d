"""The main job on a model of a user's family: SGLang serves it, Megatron trains it, and both agree on
its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.training_runs import training_run

WORDS = [
    "model.family=examples/llama/family.py:Llama",
    "model.tiny.maker=tests/support/llama_checkpoint.py:make",
    "run.num_steps=2",
    "run.name=demo",
    "scheduler.executions_per_group=4",
    "scheduler.groups_per_step=1",
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llama_is_served_trained_and_published(tmp_path: Path) -> None:
    words = [word for override in WORDS for word in ("--set", override)]
    with training_run(tmp_path, *words) as run:
        assert run.wait(timeout_s=500) == 0, run.output[-4000:]
        assert run.survivors() == []
    records = run.records()
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["optimizer/grad_norm"] > 0
    # Before the first step, and after each publication: the same tokens, scored by both.
    assert all(record["logprob_gap"] <= 1e-4 for record in records)
    (model,) = (tmp_path / "models").iterdir()
    names = load_file(model / "model.safetensors").keys()
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if "q_norm" in name or "experts" in name]
