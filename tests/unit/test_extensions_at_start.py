"""A mistake in what a user brings ends the control plane before the run's directory exists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from docs.make_extension_table import extension_points
from gyre_megatron.config.loader import GyreConfig, load_config, section_type
from gyre_megatron.errors import ConfigError
from gyre_megatron.runtime.service import ServiceSpec, serve
from tests.support.checkpoints import make_checkpoint

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.proxy.dialects=[chat, nope]", "unknown name 'nope'"),
        ("rollout.proxy.harness_profile=claude", "did you mean claude_code"),
        ("rollout.proxy.tool_call_format=no.such:thing", "cannot be imported"),
        ("rollout.harness.kind=comand", "did you mean command"),
        ("rollout.harness.container_prefix=[docker, '{wrokspace}']", "did you mean {workspace}"),
        ("weights.transport=collectiv", "did you mean collective"),
        ("weights.transport=tests.unit.test_weights_config:no_peers", "cannot be called as"),
        ("weights.transport=file", "weights.file_dir is not set"),
        ("weights.interface=eth99", "no network interface or address 'eth99'"),
        ("rollout.harness.tasks=null", "rollout.harness.tasks is not set"),
    ],
)
def test_nothing_is_written(tmp_path: Path, override: str, message: str) -> None:
    root = tmp_path / "runs"
    config = load_config(DEMO, [f"run.root={root}", override]).config
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=message):
        asyncio.run(serve(ServiceSpec(config, checkpoint, 1, resume=False)))
    assert not root.exists()


@pytest.mark.parametrize("key", [p.key for _, p in extension_points() if p.key != "evaluator.kind"])
def test_no_field_closes_an_extension_point(key: str) -> None:
    """A `Literal` would refuse what the loader behind it takes. (Evaluators are named by tasks.)"""
    *sections, name = key.split(".")
    here = GyreConfig
    for section in sections:
        here = section_type(here.model_fields[section].annotation)
    assert here.model_fields[name].annotation in (str, list[str])
