"""The CPU layer: versions are checked, CUDA machines are left alone, other libraries keep
working."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gyre_megatron.errors import VersionError
from gyre_megatron.cpu import megatron as megatron_cpu


def test_an_untested_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(megatron_cpu.importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(VersionError, match=r"megatron-core 0\.17\.0 was found, 0\.16\.x was tested"):
        megatron_cpu.install()


def test_a_missing_megatron_is_named(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise megatron_cpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(megatron_cpu.importlib.metadata, "version", missing)
    with pytest.raises(VersionError, match="make setup"):
        megatron_cpu.install()


def run_in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_patched_where_cuda_exists() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
before = (torch.zeros, torch.Tensor.type, torch.cuda.Stream, torch.cuda.current_device)
import importlib.util
spec = importlib.util.spec_from_file_location("layer", %r)
layer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layer)
layer.install()
print(before == (torch.zeros, torch.Tensor.type, torch.cuda.Stream, torch.cuda.current_device))
"""
    assert run_in_a_fresh_process(code % megatron_cpu.__file__) == "True"


def test_device_contexts_still_apply_to_factories() -> None:
    """Libraries build models under `with torch.device("meta")`; wrapped factories must obey it."""
    code = """
import gyre_megatron.training, torch
with torch.device("meta"):
    made = [torch.zeros(2), torch.full((2,), 1.0), torch.tensor([1.0]), torch.arange(3), torch.empty(1)]
print({t.device.type for t in made})
"""
    assert run_in_a_fresh_process(code).splitlines()[-1] == "{'meta'}"


def test_cuda_named_in_a_factory_means_this_device() -> None:
    assert torch.zeros(1, device="cuda").device.type == torch.zeros(1, device=torch.cuda.current_device()).device.type
