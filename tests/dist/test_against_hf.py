"""Tree training against Hugging Face's models in float64 and the objective written out per
trajectory."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.trajectory.packing import PackedBin, pack
from tests.dist import gradients
from tests.dist.flatten import flat_bins
from tests.dist.tiny import CONFIGS, FAMILIES, VOCAB, make_checkpoint
from tests.unit.random_trees import random_tree

GSPO = GspoConfig(eps_low=0.5, eps_high=1.0)


@functools.cache
def trees():
    return [random_tree(1000 + seed, vocab=VOCAB, max_children=3) for seed in range(10)]


def hf_model(kind: str, weights: dict[str, torch.Tensor]):
    """The family's own class in float64; experts fused as transformers 5 keeps them in memory."""
    import transformers

    config = transformers.AutoConfig.for_model(**CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    state = {name: w for name, w in weights.items() if ".mlp.experts." not in name}
    for prefix in sorted({n.split(".experts.")[0] + ".experts." for n in weights if ".mlp.experts." in n}):
        count = CONFIGS[kind]["num_experts"]
        part = lambda e, name, prefix=prefix: weights[f"{prefix}{e}.{name}.weight"]  # noqa: E731
        gate_up = [torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(count)]
        state[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
        state[f"{prefix}down_proj"] = torch.stack([part(e, "down_proj") for e in range(count)])
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if kind == "tied" else set())
    return model.double()


def hf_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients in checkpoint names."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(grad):
                gate, up = both.chunk(2)
                found[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(grad):
                found[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            found[name] = grad
    return found


def sequence_loss(model, trajectory: PackedBin) -> torch.Tensor:
    """GSPO as its paper writes it: one ratio per sequence, gradient through the ratio."""
    logits = model(torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]).logits[0]
    logits = logits[trajectory.edge_sources.astype(np.int64)] / torch.from_numpy(trajectory.edge_temperatures)[:, None]
    labels = torch.from_numpy(trajectory.edge_labels.astype(np.int64))
    logprobs = logits.log_softmax(-1)[torch.arange(len(labels)), labels]
    ratio = (logprobs - torch.from_numpy(trajectory.edge_behaviour_logprobs)).mean().exp()
    advantage = float(trajectory.trajectory_advantages[0])
    clipped = ratio.clamp(1 - GSPO.eps_low, 1 + GSPO.eps_high)
    return -float(trajectory.edge_weights.sum()) * torch.minimum(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "hybrid", "llama"])
def test_loss_and_gradients_equal_float64(kind: str, ranks, tmp_path) -> None:
    """Llama is no family of ours: it comes from examples/ through `model.family`."""
    from safetensors.torch import load_file

    checkpoint = make_checkpoint(kind, tmp_path / kind)
    config = TrainingConfig(token_budget=2048, gspo=GSPO)
    packed = pack(trees(), config.token_budget, len(trees()))
    family = FAMILIES.get(kind, "auto")
    ((sums, _, grads),) = ranks(1).run(gradients.run_batches, checkpoint, config, [packed], 1, family)[0]
    model = hf_model(kind, load_file(checkpoint / "model.safetensors"))
    losses = []
    for trajectory in flat_bins(trees()):
        loss = sequence_loss(model, trajectory)
        loss.backward()
        losses.append(loss.item())
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-5)
    expected = hf_gradients(model)
    assert grads.keys() == expected.keys()
    errors = {n: float((grads[n] - e).norm() / e.norm().clamp(min=1e-12)) for n, e in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 1e-5, f"gradient of {worst} is off by {errors[worst]:.1e}"
