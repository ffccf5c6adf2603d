"""Importing Gyre changes nothing: not torch, not Megatron, not the process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def run_in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


EVERY_MODULE = """
import importlib, pkgutil
from tests.support import library_state
library_state.import_megatron()
before = library_state.state()
import gyre_megatron
found = [m.name for m in pkgutil.walk_packages(gyre_megatron.__path__, "gyre_megatron.")]
names = [name for name in found if not name.endswith("__main__")]  # those are programs
for name in names:
    importlib.import_module(name)
changed = library_state.changes(before, library_state.state())
import megatron.core.ssm.gated_delta_net as gdn, torch
from gyre_megatron.cpu import cpu_enabled
print(len(names) > 100, cpu_enabled(), torch.ones(1).type(), gdn.HAVE_FLA, changed)
"""


def test_no_module_of_ours_changes_torch_or_megatron() -> None:
    """`import gyre_megatron.training` once made `torch.ones(1).type()` say cuda."""
    fla = importlib.util.find_spec("fla") is not None
    assert run_in_a_fresh_process(EVERY_MODULE) == f"True False torch.FloatTensor {fla} []"


def test_importing_the_training_room_is_cheap() -> None:
    code = """
import sys
import gyre_megatron.training, gyre_megatron.algos
print(sorted({"megatron", "torch"} & set(sys.modules)))
"""
    assert run_in_a_fresh_process(code) == "[]"
