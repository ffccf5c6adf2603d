"""Inside somebody's own Megatron program: place, shape and training section are read off Megatron,
and its loop gives the gradients and weights that our trainer gives."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import GspoConfig, OptimizerConfig, TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.trajectory.packing import PackedBin, pack
from gyre_megatron.weights import Parallelism, bind, hf_named_tensors, layout_of, open_transport
from tests.dist.gradients import canonical_gradients, make_trainer
from tests.dist.tiny import CONFIGS, VOCAB, make_checkpoint
from tests.support import megatron_models
from tests.unit.random_trees import random_tree

SCRIPT = Path(__file__).parents[2] / "examples" / "megatron" / "script.py"
LR = 1e-3
ROPE = {"dense": 1.0, "moe": 1.0, "hybrid": 0.5}


def bins(count: int = 6) -> list[PackedBin]:
    trees = [random_tree(2500 + i, vocab=VOCAB, max_children=3) for i in range(count)]
    return pack(trees, 400, count)


def script():
    """The example, as a user's program would be: outside the package."""
    spec = importlib.util.spec_from_file_location("megatron_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def initialize(**sizes: int) -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        sizes.get("tp", 1),
        sizes.get("pp", 1),
        sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def user_config(kind: str, **changes: Any):
    """A TransformerConfig as a Megatron user writes it, from sizes of their own."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = CONFIGS[kind]
    tp, pp = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    fields: dict[str, Any] = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=mpu.get_expert_tensor_parallel_world_size(),
        sequence_parallel=tp > 1,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    if vpp:
        fields |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if kind != "dense":
        fields |= dict(
            num_moe_experts=hf["num_experts"],
            moe_router_topk=hf["num_experts_per_tok"],
            moe_ffn_hidden_size=hf["moe_intermediate_size"],
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
        )
    if kind == "hybrid":
        fields |= dict(
            layernorm_zero_centered_gamma=True,
            attention_output_gate=True,
            moe_shared_expert_intermediate_size=hf["shared_expert_intermediate_size"],
            moe_shared_expert_gate=True,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=hf["full_attention_interval"],
            linear_conv_kernel_dim=hf["linear_conv_kernel_dim"],
            linear_key_head_dim=hf["linear_key_head_dim"],
            linear_value_head_dim=hf["linear_value_head_dim"],
            linear_num_key_heads=hf["linear_num_key_heads"],
            linear_num_value_heads=hf["linear_num_value_heads"],
        )
    config = TransformerConfig(**(fields | changes))
    config.context_parallel_size = mpu.get_context_parallel_world_size()
    return config


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


# Training


def weights_of(chunks, architecture, place, name: str) -> dict[str, torch.Tensor]:
    """Whole on rank 0; the name of the transport is used once."""
    store = dist.distributed_c10d._get_default_store()
    carrier = open_transport(WeightsConfig(), store, dist.get_rank(), dist.get_world_size(), name=name)
    groups = list(hf_named_tensors(chunks, architecture, place, carrier, torch.float32))
    carrier.close()
    return {name: tensor for group in groups for name, tensor in group.items()}


def by_the_script(checkpoint: Path, kind: str, sizes: dict, name: str):
    """(sums of the step, gradients, weights after it)."""
    from gyre_megatron.integrations.megatron import parallel_rank
    from gyre_megatron.training.parameters import named_parameters

    initialize(**sizes)
    mine = script()
    program = mine.setup(user_config(kind), checkpoint, LR)
    place = parallel_rank(program.config)
    chunks = [chunk.module for chunk in program.model]
    as_trainer = SimpleNamespace(
        architecture=program.architecture,
        model_chunks=chunks,
        parallel_rank=lambda: place,
        named_parameters=lambda: named_parameters(chunks),
    )
    gradients = []
    take_step = program.optimizer.step

    def step():  # what the optimizer is given, before it clips
        gradients.append(canonical_gradients(as_trainer))
        return take_step()

    program.optimizer.step = step
    sums = mine.step(program, bins(), weight_version=3)
    return sums, gradients[0], weights_of(chunks, program.architecture, place, name)


def by_the_trainer(checkpoint: Path, sizes: dict, name: str):
    optimizer = OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad=1.0, decay_style="constant")
    gspo = GspoConfig(eps_low=0.2, eps_high=0.2)
    config = TrainingConfig(token_budget=1024, gspo=gspo, optimizer=optimizer, **sizes)
    trainer = make_trainer(checkpoint, config, with_optimizer=True)
    trainer.begin_batch(3)
    sums = trainer.micro_step(bins())
    trainer.finish_gradients()
    gradients = canonical_gradients(trainer)
    trainer.optimizer_step()
    weights = weights_of(trainer.model_chunks, trainer.architecture, trainer.parallel_rank(), name)
    return sums, gradients, weights


LAYOUTS = [
    ("dense", 1, {}),
    ("dense", 2, dict(tp=2)),
    ("dense", 2, dict(pp=2)),
    ("dense", 2, dict(pp=2, vpp=2)),
    ("dense", 2, {}),  # two data-parallel replicas
    ("dense", 2, dict(cp=2)),
    ("moe", 2, dict(ep=2)),
    ("moe", 2, dict(tp=2)),
    ("hybrid", 2, dict(pp=2)),
]


@pytest.mark.parametrize(
    ("kind", "size", "sizes"),
    LAYOUTS,
    ids=["-".join([k, *(f"{n}{v}" for n, v in s.items())] or [f"dp{size}"]) + f"-{size}" for k, size, s in LAYOUTS],
)
def test_a_users_loop_steps_to_the_same_weights_as_the_trainer(
    kind: str, size: int, sizes: dict, ranks, checkpoints, request
) -> None:
    name = request.node.callspec.id
    checkpoint = checkpoints(kind)
    expected_sums, gradients, expected = ranks(size).run(by_the_trainer, checkpoint, sizes, f"t/{name}")[0]
    results = ranks(size).run(by_the_script, checkpoint, kind, sizes, f"s/{name}")
    before = load_file(checkpoint / "model.safetensors")
    for sums, *_ in results:
        assert sums.keys() == expected_sums.keys()
        assert sums == pytest.approx(expected_sums, rel=1e-5, abs=1e-9)
    _, found, weights = results[0]
    assert found.keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        torch.testing.assert_close(
            found[tensor], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=tensor
        )
    assert weights.keys() == expected.keys()
    for tensor, value in expected.items():
        # Adam's first step moves an element by LR in the direction of its gradient, whatever the
        # size: where the gradient is rounding error, the direction is too.
        clear = gradients[tensor].abs() > 1e-3 * gradients[tensor].abs().max()
        assert clear.any(), tensor
        torch.testing.assert_close(weights[tensor][clear], value[clear], rtol=1e-5, atol=LR * 1e-2)
        assert not torch.equal(weights[tensor], before[tensor]), tensor


# What is read off Megatron


def place_and_binding(sizes: dict, changes: dict, kind: str = "dense") -> tuple:
    """(place, layers here) of a stock GPTModel of the user's, matched with its live modules."""
    from gyre_megatron.integrations.megatron import architecture_of, parallel_rank

    initialize(**sizes)
    config = user_config(kind, **changes)
    place = parallel_rank(config)
    architecture = architecture_of(
        config, vocab_size=96, rope_theta=1e4, partial_rotary_factor=ROPE[kind], max_position_embeddings=1024
    )
    assert architecture == Architecture.from_hf(CONFIGS[kind])
    chunks = megatron_models.build(architecture, place.parallelism)
    bind(layout_of(architecture, place, chunks), place.index, chunks)
    return place, place.parallelism.layers_of(architecture.num_layers)[place.pp_rank]


UNEVEN = dict(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3)


@pytest.mark.parametrize(
    ("size", "sizes", "changes", "layers"),
    [
        (4, dict(tp=2, pp=2), {}, None),
        (4, dict(pp=2), UNEVEN, (((0,),), ((1, 2, 3),))),
        (2, dict(pp=2, vpp=2), {}, None),
        (4, dict(tp=2), {}, None),
    ],
    ids=["tp2pp2", "uneven", "vpp", "tp2dp2"],
)
def test_the_place_is_megatrons(size: int, sizes: dict, changes: dict, layers, ranks) -> None:
    whole = Parallelism(
        tp=sizes.get("tp", 1),
        pp=sizes.get("pp", 1),
        vpp=sizes.get("vpp", 1),
        dp=size // (sizes.get("tp", 1) * sizes.get("pp", 1)),
        etp=sizes.get("tp", 1),
        stage_layers=layers,
    )
    found = ranks(size).run(place_and_binding, sizes, changes)
    assert [place for place, _ in found] == [whole.rank(rank) for rank in range(size)]
    if layers:
        assert {here for _, here in found} == set(layers)


@pytest.mark.parametrize(("kind", "sizes"), [("moe", dict(ep=2)), ("moe", dict(tp=2, etp=1, ep=2)), ("hybrid", dict(tp=2))])
def test_the_shape_is_that_of_the_checkpoint(kind: str, sizes: dict, ranks) -> None:
    found = ranks(2).run(place_and_binding, sizes, {}, kind)
    assert [place.ep_rank for place, _ in found] == ([0, 1] if "ep" in sizes else [0, 0])


def other_order() -> None:
    from megatron.core import parallel_state as mpu

    from gyre_megatron.integrations.megatron import parallel_rank

    initialize()
    config = user_config("dense")
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 2, order="tp-cp-ep-pp-dp")
    parallel_rank(config)


def not_initialized() -> None:
    from megatron.core import parallel_state as mpu

    from gyre_megatron.integrations.megatron import parallel_rank

    initialize()
    config = user_config("dense")
    mpu.destroy_model_parallel()
    parallel_rank(config)


def refused(kind: str, changes: dict, options: dict, sizes: dict) -> None:
    from gyre_megatron.integrations.megatron import training_config, tree_forward_step

    initialize(**sizes)
    architecture = Architecture.from_hf(CONFIGS[kind])
    tree_forward_step(training_config(user_config(kind, **changes), architecture, **options))


@pytest.mark.parametrize(
    ("kind", "changes", "options", "sizes", "message"),
    [
        ("dense", dict(hidden_size=64), {}, {}, "differ in hidden_size 64 vs 32"),
        ("moe", dict(moe_router_topk=3), {}, {}, "differ in moe"),
        ("dense", dict(hidden_dropout=0.1), {}, {}, "ratios to the sampling policy need both at 0"),
        ("dense", dict(calculate_per_token_loss=False), {}, {}, "makes Megatron divide gradients"),
        ("dense", dict(params_dtype=torch.float16), {}, {}, "params_dtype=torch.float16"),
        ("dense", {}, dict(tp=2), {}, "tp follow from Megatron"),
        ("dense", {}, dict(gspo=GspoConfig(kl_coefficient=0.1)), {}, "needs the reference policy"),
        ("dense", {}, dict(objective="gsop"), {}, "did you mean gspo"),
        ("moe", dict(moe_layer_freq=[1, 0, 1, 1]), {}, {}, "only leading layers may be dense"),
        ("dense", UNEVEN, {}, dict(pp=2), None),
    ],
)
def test_what_would_train_something_else_is_refused(
    kind: str, changes: dict, options: dict, sizes: dict, message: str | None, ranks
) -> None:
    run = lambda: ranks(2).run(refused, kind, changes, options, sizes)  # noqa: E731
    if message is None:
        run()
        return
    with pytest.raises(RuntimeError) as error:
        run()
    assert "ConfigError" in str(error.value) and message in str(error.value)


def test_groups_of_another_order_or_none_are_refused(ranks) -> None:
    with pytest.raises(RuntimeError, match=r"LayoutError: rank \d of 4 stands at .*default order"):
        ranks(4).run(other_order)
    with pytest.raises(RuntimeError, match="LayoutError: Megatron's groups do not exist yet"):
        ranks(1).run(not_initialized)


def from_args(vocab_size: int | None) -> Architecture:
    from gyre_megatron.integrations.megatron import architecture_from_args

    initialize()
    args = SimpleNamespace(
        vocab_size=vocab_size,
        rotary_base=10_000,
        rotary_percent=1.0,
        max_position_embeddings=1024,
        untie_embeddings_and_output_weights=False,
    )
    return architecture_from_args(args, user_config("dense"))


def test_arguments_of_a_megatron_lm_program(ranks) -> None:
    assert ranks(1).run(from_args, 96) == [Architecture.from_hf(CONFIGS["tied"])]
    with pytest.raises(RuntimeError, match="args.vocab_size is not set: give --vocab-size"):
        ranks(1).run(from_args, None)
