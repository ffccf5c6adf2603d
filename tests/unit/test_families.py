"""The extension point `model.family`: its contract, and what is refused before a run starts."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from gyre_megatron.config.families import FAMILIES, ModelFamily, load_family
from gyre_megatron.config.loader import load_config
from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError
from gyre_megatron.weights.canonical import canonical_tensors
from tests.dist.tiny import CONFIGS

ROOT = Path(__file__).parents[2]
MINE = "tests.support.families"
LLAMA = "examples/llama/family.py:Llama"


def test_the_contract_is_this() -> None:
    """Whoever wrote a family relies on it."""
    assert FAMILIES.parameters == ()
    arguments = {
        name: list(inspect.signature(getattr(ModelFamily, name)).parameters)[1:]
        for name in ("architecture", "transformer_fields", "layer_spec")
    }
    assert arguments == {
        "architecture": ["config"],
        "transformer_fields": ["architecture"],
        "layer_spec": ["spec", "config", "layer"],
    }
    own = ModelFamily()
    assert (own.model_types, own.parts, own.shared_expert) == ((), None, "shared_expert")
    spec = object()
    assert own.layer_spec(spec, None, 0) is spec and own.transformer_fields(None) == {}


@pytest.mark.parametrize("name", FAMILIES.builtin)
def test_our_own_fill_it(name: str) -> None:
    for method in ("architecture", "transformer_fields", "layer_spec"):
        ours = inspect.signature(getattr(type(load_family(name)), method))
        assert list(ours.parameters) == list(
            inspect.signature(getattr(ModelFamily, method)).parameters
        )


def test_no_two_of_ours_take_one_model_type() -> None:
    taken = [kind for name in FAMILIES.builtin for kind in load_family(name).model_types]
    assert len(taken) == len(set(taken)) >= len(FAMILIES.builtin)


def test_llama_is_read_through_the_hook_and_not_without_it() -> None:
    with pytest.raises(ConfigError, match=r"'llama' is not supported; .* named by model.family"):
        Architecture.from_hf(CONFIGS["llama"])
    found = Architecture.from_hf(CONFIGS["llama"], LLAMA)
    assert found.family == LLAMA and not found.qk_norm
    same = Architecture.from_hf(CONFIGS["dense"])
    names = [name for name in canonical_tensors(same) if "_norm.weight" not in name]
    assert list(canonical_tensors(found)) == [*names]
    again = Architecture.model_validate(found.model_dump(mode="json"))  # as an engine is told it
    assert again == found


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_llama_refuses_what_it_cannot_say(changed: dict) -> None:
    with pytest.raises(ConfigError, match="this Llama has"):
        Architecture.from_hf(CONFIGS["llama"] | changed, LLAMA)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen4", "model.family: unknown name 'qwen4'; did you mean qwen3?"),
        (f"{MINE}:no_family", "made a dict; derive it from"),
        (f"{MINE}:wants_an_argument", "cannot be called as"),
        (f"{MINE}:Short", "cannot read config.json: hidden_size: Field required"),
        ("qwen3_next", "config.json has no 'linear_num_key_heads', which family qwen3_next needs"),
        ("qwen3_moe", r"has the parts \('moe',\), found \(\)"),
    ],
)
def test_what_cannot_work_is_refused_by_name(family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Architecture.from_hf(CONFIGS["dense"], family)


def test_an_architecture_of_the_configuration_names_its_family_too(tmp_path: Path) -> None:
    shape = Architecture.from_hf(CONFIGS["llama"], LLAMA).model_dump(mode="json")
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{architecture: {shape}}}".replace("'", "").replace("None", "null"))
    assert load_config(file, partial=True).config.model.shape().family == LLAMA
    file.write_text(file.read_text().replace(LLAMA, "lama"))
    with pytest.raises(ConfigError, match="unknown name 'lama'"):
        load_config(file, partial=True)
