"""A real Megatron cell publishes into a real SGLang server: same log-probabilities, same bits,
faults leave the old."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from gyre_megatron.config.cluster import EngineConfig
from gyre_megatron.engines.server import ServerSpec, SglangServer
from tests.dist.ranks import RankPool
from tests.e2e import install_jobs
from tests.support.checkpoints import make_checkpoint
from tests.support.hf_configs import hf_config
from tests.support.reference_shards import whole_weights

pytestmark = pytest.mark.e2e
SEQUENCES = [list(range(20, 60)), [7, 300, 41, 5, 99, 123, 250, 77] * 3]
TOLERANCE = 1e-4
FAULTS = {
    "corrupted": "1 tensors arrived damaged on engine rank 0",
    "refusing engine": "process 0 failed first: EngineError",
    "hung": "processes [2] did not answer",
}
"""What every rank is told."""
CASES = [
    pytest.param("dense", 1, dict(tp=2, pp=2), id="dense-tp1"),
    pytest.param("moe", 2, dict(tp=2, pp=2, ep=2, etp=1), id="moe-tp2"),
    pytest.param("dense", 2, dict(tp=2, pp=2), id="dense-tp2", marks=pytest.mark.slow),
    pytest.param("moe", 1, dict(tp=2, pp=2, ep=2, etp=1), id="moe-tp1", marks=pytest.mark.slow),
]


def _checkpoint(family: str, folder: Path) -> Path:
    from tests.support.megatron_models import ARCHITECTURES

    architecture = ARCHITECTURES[family].model_copy(update={"vocab_size": 512})
    make_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(hf_config(architecture)))
    weights = {
        n: 1 + 0.1 * t if "norm" in n else 0.08 * t for n, t in whole_weights(architecture).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Cell:
    """Training ranks and their server; `settings` are those of install_jobs.start."""

    def __init__(
        self,
        family: str,
        tp: int,
        layout: dict[str, int],
        folder: Path,
        num_ranks: int = 4,
        **settings: Any,
    ) -> None:
        self.checkpoint, self.folder = _checkpoint(family, folder / "checkpoint"), folder
        engine = EngineConfig(
            dtype="float32",
            context_length=2048,
            max_total_tokens=8192,
            max_running_requests=8,
            mem_fraction_static=0.9,
        )
        self.server = SglangServer(
            ServerSpec(self.checkpoint, tp, "cpu", "127.0.0.1", 0, folder / "log"), engine
        )
        self.server.start()
        self.ranks = RankPool(num_ranks)
        self.server.wait_until_ready()
        arguments = (str(self.checkpoint), self.server.url, tp, layout, *settings.values())
        self.ranks.run(install_jobs.start, *arguments)

    def publish(self, version: int, fault: str | None = None) -> list[str]:
        return self.ranks.run(install_jobs.publish, version, fault)

    def served(self) -> tuple[list[list[float]], str]:
        """The engine's log-probabilities of SEQUENCES and its weight version."""
        scores, version = [], ""
        for ids in SEQUENCES:
            body = dict(
                input_ids=ids,
                return_logprob=True,
                logprob_start_len=0,
                sampling_params=dict(max_new_tokens=1, temperature=0, ignore_eos=True),
            )
            info = self.server.generate(body)["meta_info"]
            scores.append([entry[0] for entry in info["input_token_logprobs"][1:]])
            version = info["weight_version"]
        return scores, version

    def difference(self) -> float:
        """Largest difference between the trainer's and the engine's log-probabilities."""
        trained = self.ranks.run(install_jobs.score, SEQUENCES)[0]
        served, _ = self.served()
        pairs = zip(trained, served, strict=True)
        return max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)

    def checksums(self) -> list[dict[str, str]]:
        answer = self.server.post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]

    def close(self) -> None:
        self.ranks.close()
        self.server.stop()


@pytest.mark.parametrize(("family", "tp", "layout"), CASES)
def test_install(family, tp, layout, tmp_path):
    cell = Cell(family, tp, layout, tmp_path)
    try:
        _agrees_after_every_publish(cell)
        _calls_in_flight_go_on(cell)
        faults = FAULTS if tp == 1 else ("corrupted",)
        for fault in faults:
            _fault_leaves_the_old_version(cell, fault)
        _a_hundred_publishes_leave_nothing_behind(cell)
        _same_bits_as_from_disk(cell)
        _documented_example_works(cell, tp)
        _documented_integration_works(cell, tp)
    finally:
        cell.close()
    assert not list(Path("/dev/shm").glob("gyre-weights-*/shadow.*"))


def _agrees_after_every_publish(cell: Cell) -> None:
    for version in (1, 2):
        cell.ranks.run(install_jobs.step)
        assert cell.difference() > TOLERANCE  # the engine still serves the version before
        assert cell.publish(version) == [""] * 4
        assert cell.difference() < TOLERANCE
        assert cell.served()[1] == str(version)


def _calls_in_flight_go_on(cell: Cell) -> None:
    body = dict(
        input_ids=SEQUENCES[0],
        sampling_params=dict(max_new_tokens=600, temperature=1, ignore_eos=True),
    )
    answers: list[dict] = []
    call = threading.Thread(target=lambda: answers.append(cell.server.generate(body)))
    call.start()
    time.sleep(0.5)  # some tokens are out, most are not
    cell.ranks.run(install_jobs.step)
    assert cell.publish(3) == [""] * 4
    call.join(120)
    info = answers[0]["meta_info"]
    assert len(answers[0]["output_ids"]) == 600 and info["finish_reason"]["type"] == "length"
    assert info["weight_version"] == "3" and len(info["weight_versions"]) == 2
    assert cell.difference() < TOLERANCE


def _fault_leaves_the_old_version(cell: Cell, fault: str) -> None:
    before, version = cell.served()
    cell.ranks.run(install_jobs.step)
    told = cell.publish(90, fault)
    assert all("previous weights stay in place" in message for message in told), told
    assert len(set(told)) == 1 and FAULTS[fault] in told[0]
    assert cell.served() == (before, version)
    assert cell.publish(int(version) + 1) == [""] * 4
    assert cell.difference() < TOLERANCE


def _a_hundred_publishes_leave_nothing_behind(cell: Cell) -> None:
    def engine() -> tuple[int, int]:
        tree = psutil.Process(cell.server._process.pid)
        processes = [tree, *tree.children(recursive=True)]
        return sum(p.num_fds() for p in processes), sum(
            p.memory_info().rss for p in processes
        ) >> 20

    cell.ranks.run(install_jobs.publish_often, 10, 1000)
    descriptors, resident_mib = engine()
    segments = len(list(Path("/dev/shm").iterdir()))
    for early, late in cell.ranks.run(install_jobs.publish_often, 100, 2000):
        assert late <= early
    assert engine()[0] <= descriptors + 2 and engine()[1] <= resident_mib + 16
    assert len(list(Path("/dev/shm").iterdir())) <= segments + 2  # others may use it too


def _same_bits_as_from_disk(cell: Cell) -> None:
    installed = cell.checksums()
    path = cell.folder / "saved"
    cell.ranks.run(install_jobs.save, str(path))
    cell.server.post("/update_weights_from_disk", {"model_path": str(path)})
    assert cell.checksums() == installed


def _documented_example_works(cell: Cell, tp: int) -> None:
    code = re.search(r"```python\n(.*?)```", Path("docs/hot_swap.md").read_text(), re.DOTALL)
    assert code is not None and len(code[1].splitlines()) <= 25
    assert cell.ranks.run(install_jobs.documented_example, code[1], cell.server.url, tp) == [7] * 4
    assert cell.served()[1] == "7"
    assert cell.difference() < TOLERANCE


def _documented_integration_works(cell: Cell, tp: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/integrations.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "weight_sync(" in block]
    cell.ranks.run(install_jobs.step)
    assert cell.ranks.run(install_jobs.documented_example, code, cell.server.url, tp) == [8] * 4
    assert cell.served()[1] == "8"
    assert cell.difference() < TOLERANCE
