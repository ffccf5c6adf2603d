"""What users bring to training: each hook's contract, and what is refused before a run starts."""

from __future__ import annotations

import inspect

import pytest
import torch

from gyre_megatron.algos import EdgeBatch, ObjectiveContext, ObjectiveResult
from gyre_megatron.algos.extensions import OBJECTIVES, load_objective
from gyre_megatron.algos.objective import diagnose
from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.errors import ConfigError, TrajectoryError
from gyre_megatron.training.attention_cores import ATTENTION_CORES, load_attention_core
from gyre_megatron.training.extensions import check_extensions
from gyre_megatron.trajectory.admission import trains_without_advantage

MINE = "tests.support.training_extensions"
EDGES = EdgeBatch(
    weights=torch.tensor([0.25, 0.25, 0.5]),
    behaviour_logprobs=torch.tensor([-1.1, -1.3, -0.9]),
    versions=torch.zeros(3, dtype=torch.int64),
    trajectories=torch.tensor([0, 0, 1]),
    advantages=torch.tensor([1.0, -1.0]),
    executions=torch.tensor([0, 1]),
)


@pytest.mark.parametrize("point", [OBJECTIVES, ATTENTION_CORES], ids=lambda point: point.key)
def test_our_own_hooks_fill_the_contract(point) -> None:
    for name, hook in point.builtin.items():
        assert point.load(name) is hook
        assert tuple(inspect.signature(hook).parameters) == point.parameters


def test_the_contracts_are_these() -> None:
    """Whoever wrote a hook relies on them."""
    assert OBJECTIVES.parameters == ("logprobs", "entropies", "edges", "context")
    assert ATTENTION_CORES.parameters == ("query", "key", "value", "params", "scale")
    fields = lambda cls: list(inspect.signature(cls).parameters)  # noqa: E731
    assert fields(ObjectiveResult) == ["loss", "ratios", "clipped", "masked"]
    assert fields(ObjectiveContext) == [
        "config",
        "options",
        "reference_logprobs",
        "weight_version",
        "reduce",
    ]


@pytest.mark.parametrize(
    ("fields", "device", "message"),
    [
        ({"attention": "flex"}, "cpu", "no backward pass on a CPU; set auto or cpu"),
        ({"attention": "cpu"}, "cuda", "reads tensors in host memory; set auto or flex"),
        ({"attention": "flux"}, "cpu", "did you mean flex"),
        ({"attention": f"{MINE}:too_few"}, "cpu", r"cannot be called as \(query, key, value"),
        ({"attention": f"{MINE}:calls"}, "cpu", "is a int; a function or class was expected"),
        ({"objective": "gsop"}, "cpu", "did you mean gspo"),
        ({"objective": f"{MINE}:too_few"}, "cpu", r"cannot be called as \(logprobs, entropies, ed"),
        ({"objective": f"{MINE}:imitatee"}, "cpu", f"did you mean {MINE}:imitate"),
        ({"objective_options": {"factor": 2}}, "cpu", "gspo reads training.gspo and no options"),
    ],
)
def test_what_cannot_work_is_refused_by_key(fields: dict, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_extensions(TrainingConfig(**fields), device)
    assert f"training.{next(iter(fields))}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cpu"), ("auto", "cuda"), ("cpu", "cpu"), ("flex", "cuda")]
    + [(f"{MINE}:dense_core", device) for device in ("cpu", "cuda")],
)
def test_the_chosen_core_is_the_one_that_is_named(name: str, device: str) -> None:
    assert load_attention_core(name, device).__name__ in (name.split(":")[-1], f"{name}_core")


def test_an_objective_without_advantages_keeps_executions_whose_advantage_is_zero() -> None:
    assert not trains_without_advantage(TrainingConfig())
    assert trains_without_advantage(TrainingConfig(objective=f"{MINE}:imitate"))


def run(name: str, **options):
    logprobs = torch.tensor([-1.0, -1.2, -0.8], requires_grad=True)
    context = ObjectiveContext(options=options, config=GspoConfig(eps_low=0.9, eps_high=9.0))
    objective = load_objective(TrainingConfig(objective=name, objective_options=options))
    result = objective(logprobs, torch.zeros(3), EDGES, context)
    return result, diagnose(result, logprobs, EDGES, context), logprobs


def test_what_an_objective_leaves_out_is_filled_in() -> None:
    result, found, logprobs = run(f"{MINE}:imitate")
    assert found.coefficients.tolist() == (-EDGES.weights).tolist()
    torch.testing.assert_close(found.ratios, (logprobs - EDGES.behaviour_logprobs).exp().detach())
    assert not found.clipped.any() and not found.masked.any()
    assert not found.kl_reference.any() and (found.kl_behaviour > 0).all()
    result.loss.backward()  # the graph is still there
    assert logprobs.grad is not None


def test_options_reach_the_objective() -> None:
    (ours, *_), (scaled, *_) = run("gspo"), run(f"{MINE}:scaled_gspo", factor=3.0)
    assert scaled.loss.item() == pytest.approx(3 * ours.loss.item())


@pytest.mark.parametrize(
    ("name", "message"),
    [("vector_loss", r"loss has shape \(3,\)"), ("no_result", "gave a Tensor; an ObjectiveResult")],
)
def test_a_wrong_result_is_named(name: str, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        run(f"{MINE}:{name}")


def test_a_column_of_another_length_is_named() -> None:
    logprobs = torch.tensor([-1.0, -1.2, -0.8], requires_grad=True)
    result = ObjectiveResult(logprobs.sum(), clipped=torch.zeros(2, dtype=torch.bool))
    with pytest.raises(TrajectoryError, match=r"clipped have shape \(2,\); one for each of the 3"):
        diagnose(result, logprobs, EDGES, ObjectiveContext())
