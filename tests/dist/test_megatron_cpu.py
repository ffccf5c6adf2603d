"""`enable_cpu`: the one switch that changes torch and Megatron, what it changes, and for whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron import versions
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.cpu import enable_cpu
from gyre_megatron.errors import VersionError
from tests.dist.gradients import make_trainer
from tests.dist.tiny import make_checkpoint

SEQUENCE = list(range(40))


def test_an_untested_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda package: "0.17.0")
    with pytest.raises(VersionError, match=r"megatron-core 0\.17\.0 is installed, 0\.16\.x was tested"):
        enable_cpu()


def test_a_missing_megatron_is_named(monkeypatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    with pytest.raises(VersionError, match="megatron-core is not installed"):
        enable_cpu()


def run_in_a_fresh_process(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_is_patched_where_cuda_exists() -> None:
    code = """
import logging, sys, torch
from tests.support import library_state
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
torch.cuda.is_available = lambda: True
before = library_state.state()
from gyre_megatron.cpu import cpu_enabled, enable_cpu
report = enable_cpu()
changed = library_state.changes(before, library_state.state())
print(report.enabled, cpu_enabled(), report.patches, changed)
"""
    said, done = run_in_a_fresh_process(code)
    assert said == "enable_cpu: CUDA is available, so nothing was changed"
    assert done == "False False () []"


def test_the_report_is_the_whole_change_and_can_be_undone() -> None:
    """Every attribute that differs afterwards is in the report, and nothing else is."""
    code = """
from tests.support import library_state
library_state.import_megatron()
before = library_state.state()
from gyre_megatron.cpu import enable_cpu
report = enable_cpu()
after = library_state.state()
reported = {applied.patch.target for applied in report.patches}
changed = set(library_state.changes(before, after)) | (after.keys() - before.keys())
print(sorted(changed - reported))
print(len(reported & changed) > 50, enable_cpu() is report)
for applied in reversed(report.patches):
    applied.undo()
print(library_state.changes(before, library_state.state()))
"""
    unreported, many, left = run_in_a_fresh_process(code)
    assert unreported == "[]"
    assert many == "True True"
    assert left == "[]"


def test_it_says_once_what_it_did() -> None:
    code = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("gyre_megatron.cpu").setLevel(logging.INFO)
from gyre_megatron.cpu import enable_cpu
assert str(enable_cpu()) == str(enable_cpu())
"""
    (said,) = run_in_a_fresh_process(code)
    for name in ("torch.cuda: Event, Stream", "torch.Tensor: cuda", "megatron.core.optimizer: Adam"):
        assert name in said


def test_torch_stays_truthful_for_everybody_but_megatron() -> None:
    code = '''
import torch
from gyre_megatron.cpu import enable_cpu
enable_cpu()
use = """
def use():
    made = torch.zeros(1, device="cuda")
    return made.type(), torch.cuda.current_device(), made.cuda().device, torch.cuda.Stream().query()
"""
for name in ("megatron.somewhere", "megatronic"):
    scope = {"__name__": name, "torch": torch}
    exec(use, scope)
    try:
        print(*scope["use"]())
    except Exception as error:
        print(type(error).__name__)
print(torch.ones(1).type())
for attempt in (torch.ones(1).cuda, torch.cuda.current_device, torch.cuda.Stream):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__)
'''
    for_megatron, for_others, type_, *errors = run_in_a_fresh_process(code)
    assert for_megatron == "torch.cuda.FloatTensor cpu cpu True"
    assert for_others in ("AssertionError", "RuntimeError")
    assert type_ == "torch.FloatTensor"
    assert len(errors) == 3


def test_device_contexts_and_compiled_code_still_apply_to_factories() -> None:
    """Libraries build models under `with torch.device("meta")`, and compile what makes tensors."""
    code = """
import torch
from gyre_megatron.cpu import enable_cpu
enable_cpu()
with torch.device("meta"):
    made = [torch.zeros(2), torch.full((2,), 1.0), torch.tensor([1.0]), torch.arange(3)]
print({t.device.type for t in made})
compiled = torch.compile(lambda x: x + torch.ones(2), backend="eager", fullgraph=True)
print(compiled(torch.ones(2)).tolist())
"""
    assert run_in_a_fresh_process(code) == ["{'meta'}", "[2.0, 2.0]"]


def test_a_trainer_without_it_names_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("dense", tmp_path / "dense")
    code = f"""
import torch.distributed as dist
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.training import Trainer, parallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
architecture = Architecture.from_checkpoint({str(checkpoint)!r})
for build in (Trainer, parallel.initialize):
    try:
        build(TrainingConfig(), architecture)
    except RuntimeError as error:
        print(type(error).__name__, "gyre_megatron.cpu.enable_cpu()" in str(error))
"""
    assert run_in_a_fresh_process(code) == ["DeviceError True"] * 2


def score_and_flag(checkpoint: Path) -> tuple[np.ndarray, bool]:
    import megatron.core.ssm.gated_delta_net as gdn

    return make_trainer(checkpoint, TrainingConfig()).score([SEQUENCE])[0], gdn.HAVE_FLA


@pytest.mark.parametrize("kind", ["moe", "hybrid"])
def test_it_works_after_megatron_was_imported(kind: str, ranks, tmp_path: Path) -> None:
    """The same scores whichever comes first, and nothing is compiled; whoever else builds Gated
    DeltaNet layers is still told that fla is missing."""
    checkpoint = make_checkpoint(kind, tmp_path / kind)
    code = f"""
import torch.distributed as dist
from gyre_megatron.training import Trainer  # imports Megatron
from gyre_megatron.cpu import enable_cpu
enable_cpu()
import torch._dynamo.utils as dynamo
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.trajectory.packing import pack
from tests.unit.random_trees import random_tree
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
architecture = Architecture.from_checkpoint({str(checkpoint)!r})
trainer = Trainer(TrainingConfig(), architecture, {str(checkpoint)!r})
print(trainer.score([{SEQUENCE}])[0].tolist())
trainer.begin_batch(1)
trainer.micro_step(pack([random_tree(3, vocab=96)], 1024, 1))
trainer.finish_gradients()
print(trainer.optimizer_step()["grad_norm"] > 0, dict(dynamo.counters["frames"]))
"""
    score, stepped = run_in_a_fresh_process(code)
    assert stepped == "True {}"
    expected, flag = ranks(1).run(score_and_flag, checkpoint)[0]
    np.testing.assert_array_equal(np.array(eval(score), np.float32), expected)
    assert not flag
