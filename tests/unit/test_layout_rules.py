"""One set of layout rules: plan, start-up and trainer accept the same layouts, and refuse the rest
in one line before anything starts."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre_megatron.config import layout_rules
from gyre_megatron.config.cluster import ClusterConfig, EngineConfig
from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.runtime import checks
from gyre_megatron.weights import forecast
from gyre_megatron.weights.process_groups import CellTopology

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = dict(
    vocab_size=100,  # divides by few of the sizes below: the embedding is padded
    hidden_size=64,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=96,
)
MOE = dict(num_experts=8, experts_per_token=2, intermediate_size=32)
DENSE = Architecture(family="qwen3", **BASE)
EXPERTS = Architecture(family="qwen3_moe", **BASE, moe=MOE)
HYBRID = Architecture(
    family="qwen3_next",
    **BASE | dict(intermediate_size=0, num_key_value_heads=8, num_attention_heads=16),
    attention_output_gate=True,
    moe=MOE | dict(shared_expert_intermediate_size=32),
    gdn=dict(num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=16),
)
LATENT = Architecture(
    family="deepseek_v3",
    **BASE,
    moe=MOE,
    mla=dict(
        q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
    ),
)
ARCHITECTURES = {"dense": DENSE, "experts": EXPERTS, "hybrid": HYBRID, "latent": LATENT}


def refusal(check, *arguments) -> str:
    """The error of a check, or nothing."""
    try:
        check(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


def at_start(architecture: Architecture, training: TrainingConfig, ranks: int) -> str:
    """What a run's start says to a cell of `ranks` ranks whose engine fits everywhere."""
    config = GyreConfig(
        cluster=ClusterConfig(num_cells=1),
        engine=EngineConfig(tp=1, context_length=64),
        training=training,
    )
    return refusal(checks.check_layout, config, architecture, CellTopology(ranks, 1))


GRID = [
    dict(zip(("tp", "pp", "vpp", "cp", "ep", "etp", "dp"), sizes, strict=True))
    for sizes in itertools.product(
        (1, 2, 3, 8), (1, 2, 4, 6), (None, 2), (1, 2), (1, 4, 5), (None, 1, 2), (1, 2, 4)
    )
    if sizes[2] is None or sizes[1] > 1
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plan_start_and_trainer_say_the_same(name: str):
    architecture, accepted = ARCHITECTURES[name], 0
    for sizes in GRID:
        text = ",".join(f"{key}{size}" for key, size in sizes.items() if size is not None)
        dp = sizes["dp"]
        training = TrainingConfig(**{key: size for key, size in sizes.items() if key != "dp"})
        ranks = training.min_ranks * dp
        answers = {
            refusal(layout_rules.check_training, training, architecture, ranks),  # the trainer
            refusal(forecast.training_layout, architecture, text),
            at_start(architecture, training, ranks),
        }
        assert len(answers) == 1, (text, answers)
        if answers == {""}:
            accepted += 1
            layout = forecast.training_layout(architecture, text)
            assert layout.num_ranks == ranks
            for rank in {0, ranks // 2, ranks - 1}:  # every accepted layout can be written down
                assert layout.tensors(rank)
    assert (accepted > 10) == (name != "latent")
    assert accepted < len(GRID) // 2


def test_every_entrance_calls_the_same_functions():
    """The trainer's own module cannot be imported without Megatron, so its source is read."""
    assert checks.check_training is layout_rules.check_training
    assert forecast.check_training is layout_rules.check_training
    assert checks.check_serving is forecast.check_serving is layout_rules.check_serving
    assert checks.check_engine_in_cell is layout_rules.check_engine_in_cell
    assert forecast.check_engine_in_cell is layout_rules.check_engine_in_cell
    source = ast.parse((ROOT / "gyre_megatron/training/parallel.py").read_text())
    imported = {
        (node.module, alias.name, alias.asname)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert ("gyre_megatron.config.layout_rules", "check_training", None) in imported
    entry = next(n for n in source.body if getattr(n, "name", "") == "initialize")
    calls = [s.value.func for s in entry.body if isinstance(getattr(s, "value", None), ast.Call)]
    assert "check_training" in [getattr(function, "id", "") for function in calls]


@pytest.mark.parametrize(
    ("architecture", "sizes", "ranks", "message"),
    [
        (DENSE, dict(tp=3), 3, r"training.tp=3 does not divide the model's 8 attention heads"),
        (DENSE, dict(tp=8), 8, r"4 key-value heads \(the trainer does not replicate"),
        (DENSE, dict(tp=2), 3, r"training.tp\*pp\*cp = 2\*1\*1 = 2 does not divide it"),
        (DENSE, dict(pp=40), 40, r"training.pp=40 does not divide the model's 4 layers"),
        (DENSE, dict(pp=3), 3, r"stages of equal length only\); choose one of \[1, 2, 4\]"),
        (DENSE, dict(pp=2, vpp=4), 2, r"training.pp\*vpp=8 does not divide the model's 4 layers"),
        (DENSE, dict(ep=2), 2, "training.ep=2, but qwen3 has no experts; remove training.ep"),
        (DENSE, dict(etp=2), 2, "training.etp=2, but qwen3 has no experts"),
        (EXPERTS, dict(ep=3), 3, r"training.ep=3 does not divide the model's 8 experts"),
        (EXPERTS, dict(ep=8), 2, r"ep\*etp = 8\*1 = 8 does not divide the 2 ranks of a pipeline"),
        (EXPERTS, dict(tp=2, ep=2), 2, "etp is unset and follows training.tp"),
        (EXPERTS, dict(pp=2, ep=4), 4, "does not divide the 2 ranks of a pipeline stage"),
        (EXPERTS, dict(etp=64), 64, "training.etp=64 does not divide the model's 32 expert width"),
        (EXPERTS, dict(tp=2, sequence_parallel=False), 2, "mixture-of-experts with training.tp=2"),
        (HYBRID, dict(tp=4, cp=2), 8, r"training.tp\*cp=8 does not divide .* 4 linear key heads"),
        (HYBRID, dict(tp=2, sequence_parallel=False), 2, "Gated DeltaNet|mixture-of-experts"),
        (LATENT, dict(), 1, "deepseek_v3 cannot be trained"),
    ],
)
def test_training_layouts_that_cannot_work_are_named(architecture, sizes, ranks, message):
    with pytest.raises(ConfigError, match=message):
        layout_rules.check_training(TrainingConfig(**sizes), architecture, ranks)


def test_routers_that_cannot_be_trained_are_named():
    for changes, message in (
        ({"normalize_topk": False}, "norm_topk_prob=False cannot be trained"),
        ({"experts_per_token": 1}, "num_experts_per_tok=1 cannot be trained"),
    ):
        moe = EXPERTS.moe.model_copy(update=changes)
        with pytest.raises(ConfigError, match=message):
            layout_rules.check_trainable(EXPERTS.model_copy(update={"moe": moe}))


@pytest.mark.parametrize(
    ("architecture", "tp", "ep", "dp", "message"),
    [
        (DENSE, 3, 1, 1, r"engine.tp=3 does not divide the model's 8 attention heads"),
        (DENSE, 8, 1, 1, ""),  # SGLang does replicate key-value heads
        (DENSE, 4, 4, 1, "engine.ep=4, but the model has no experts"),
        (EXPERTS, 8, 3, 1, r"engine.ep=3 does not divide engine.tp=8; choose one of \[1, 2, 4, 8"),
        (EXPERTS, 8, 1, 3, "engine.dp=3 does not divide engine.tp=8"),
        (EXPERTS, 8, 8, 8, ""),
        (HYBRID, 8, 1, 1, "does not divide the model's 4 linear key heads"),
        (HYBRID, 8, 1, 2, ""),
        (LATENT, 8, 4, 1, ""),  # served, though not trained
    ],
)
def test_serving_layouts(architecture, tp, ep, dp, message):
    said = refusal(layout_rules.check_serving, architecture, tp, ep, dp)
    assert message in said if not message else said
    if message:
        with pytest.raises(ConfigError, match=message):
            layout_rules.check_serving(architecture, tp, ep, dp)
    else:
        assert said == ""
        assert forecast.serving_layout(architecture, f"tp{tp},ep{ep},dp{dp}").tensors(tp - 1)


def planned(config: str, train: str, serve: str) -> None:
    """What `gyre plan` does before it plans the first rank."""
    architecture = load_config(ROOT / config, partial=True).config.model.shape()
    training = forecast.training_layout(architecture, train)
    serving = forecast.serving_layout(architecture, serve)
    forecast.forecast(training, serving, forecast.Rates(), ranks=[0])


@pytest.mark.parametrize(
    ("config", "train", "serve", "message"),
    [
        ("nowhere.yaml", "tp1", "tp1", "no configuration file .*nowhere.yaml"),
        ("configs", "tp1", "tp1", "is a directory"),
        ("configs/demo_cpu.yaml", "tp1", "tp1", "no model.architecture"),
        ("30b", "tp8,tp4", "tp1", "tp stands twice in layout 'tp8,tp4': tp8 and tp4"),
        ("30b", "tp1", "ep1,ep1", "ep stands twice"),
        ("30b", "tp3", "tp1", "training.tp=3 does not divide the model's 32 attention heads"),
        ("30b", "tp0", "tp1", "'tp0' in layout"),
        ("30b", "tp", "tp1", "'tp' in layout"),
        ("30b", "", "tp1", "'' in layout"),
        ("30b", "tp1,vpp2", "tp1", "vpp=2 needs pp > 1"),
        ("8b", "pp40", "tp1", "training.pp=40 does not divide the model's 36 layers"),
        ("30b", "ep8,dp2", "tp1", "does not divide the 2 ranks of a pipeline stage"),
        ("8b", "ep8", "tp1", "training.ep=8, but qwen3 has no experts"),
        ("30b", "tp4", "tp48,ep48", "engine.tp=48 does not divide the model's 32 attention"),
        ("30b", "tp4,dp8", "tp32,ep48", "engine.ep=48 does not divide engine.tp=32"),
        ("30b", "tp4", "tp8", "engine.tp=8 does not divide the 4 ranks of a cell"),
        ("configs/models/deepseek_v3.yaml", "tp4", "tp4", "deepseek_v3 cannot be trained"),
    ],
)
def test_what_plan_refuses(config: str, train: str, serve: str, message: str):
    short = {"30b": "configs/models/qwen3_30b_a3b.yaml", "8b": "configs/models/qwen3_8b.yaml"}
    with pytest.raises(ConfigError, match=message) as caught:
        planned(short.get(config, config), train, serve)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate: float):
    with pytest.raises(ConfigError, match="the network rate is"):
        forecast.Rates(network=rate)


def test_the_plan_command_refuses_in_one_line():
    words = ["--config", "configs/models/qwen3_30b_a3b.yaml", "--serve", "tp1", "--train", "tp3"]
    command = [sys.executable, "launch/plan.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "training.tp=3 does not divide the model's 32 attention heads" in done.stderr


def test_the_documented_layouts_of_the_flagship_can_be_trained():
    overlay = ROOT / "configs/models/qwen3_8_2_4t_a95b.yaml"
    architecture = load_config(overlay, partial=True).config.model.shape()
    assert forecast.training_layout(architecture, "tp4,pp4,ep64,etp1").num_ranks == 256
    assert refusal(forecast.training_layout, architecture, "tp8,pp8,ep64")
    assert forecast.serving_layout(architecture, "tp16,ep16").num_ranks == 16
