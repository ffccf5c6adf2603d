"""The main job with real Megatron-Core, real SGLang and the demo's harness: small runs, kills,
resumes, layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.training_runs import ROOT, TrainingRun, training_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def finished_executions(directory: Path) -> dict[str, tuple]:
    """Attempt, end and reward of every execution that has finished."""
    store = TrajectoryStore(directory / "store.db", read_only=True)
    try:
        finished = store.executions(states=["finished"])
        return {e.execution_id: (e.attempt, e.finished_at, e.outcome.reward) for e in finished}
    finally:
        store.close()


def check_status_pages(directory: Path) -> None:
    """What a person and Prometheus see of a running job, and what a stranger must not do to it."""
    endpoint = json.loads((directory / "control_plane.json").read_text())
    status = requests.get(f"{endpoint['url']}/status", timeout=5).json()
    assert status["step"] >= 1 and len(status["roles"]) == 2 and status["lost_calls"] == 0
    page = requests.get(f"{endpoint['url']}/metrics", timeout=5).text
    assert "gyre_waterlevel " in page and 'gyre_cell_role{cell="0",role="train"}' in page
    for action in ("next", "report", "register", "fail"):
        assert requests.post(f"{endpoint['url']}/cells/0/{action}", timeout=5).status_code == 401


def trained_steps(directory: Path) -> dict[str, int | None]:
    store = TrajectoryStore(directory / "store.db", read_only=True)
    try:
        return {group.group_id: group.trained_step for group in store.groups()}
    finally:
        store.close()


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint_and_loses_nothing(tmp_path: Path):
    small = [
        "--set",
        "run.num_steps=7",
        "--set",
        "run.checkpoint_interval=2",
        "--set",
        "scheduler.max_lag_steps=1",
    ]
    with training_run(tmp_path, *small) as run:
        run.wait_for_steps(3, timeout_s=180)
        run.kill_everything()
        assert run.survivors() == []
    before = finished_executions(run.directory)
    assert before, "something must have finished before the kill"

    with training_run(tmp_path, *small, "--resume") as resumed:
        assert resumed.wait(240) == 0, resumed.output[-4000:]
        assert resumed.survivors() == []
    after = finished_executions(run.directory)
    assert {name: after[name] for name in before} == before, "a finished execution was run again"

    records = resumed.records()
    assert [record["step"] for record in records] == list(range(1, 8))
    in_records = [group for record in records for group in record["groups"]]
    assert len(in_records) == len(set(in_records)), "a group was trained twice"
    steps = trained_steps(run.directory)
    assert {group: step for group, step in steps.items() if step is not None} == {
        group: record["step"] for record in records for group in record["groups"]
    }
    assert len(in_records) == len(steps) == 7 * 2, "every group that was dispatched was trained"
    assert all(record["logprob_gap"] <= 1e-4 for record in records)
    assert records[-1]["lost_calls"] == 0 and records[-1]["harness_errors"] == 0
    assert (run.directory / "checkpoints" / "latest.json").exists()
    for name in ("timeline.png", "reward.png", "summary.json"):
        assert (run.directory / name).stat().st_size > 100
    assert list((run.directory / "tensorboard").iterdir())


def test_a_burst_of_two_steps_brings_joining_cells_to_the_cores_weights(tmp_path: Path):
    words = "run.num_steps=4 scheduler.steps_per_burst=2 scheduler.groups_per_step=1 training.token_budget=256"
    with training_run(tmp_path, *[w for word in words.split() for w in ("--set", word)]) as run:
        run.wait_for_steps(1, 150)
        check_status_pages(run.directory)
        assert run.wait(200) == 0, run.output[-4000:]
        assert run.survivors() == []
    records = run.records()
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["staleness"] for record in records] == [0, 1, 0, 1], (
        "the second step of a burst trains older samples"
    )
    assert sum(record["micro_steps_by_cell"].get("1", 0) for record in records) > 0, (
        "the satellite must have trained"
    )
    assert records[-1]["role_switches"] >= 6
    assert all(record["logprob_gap"] <= 1e-4 for record in records)


def exported(run: TrainingRun, output: Path, *launcher: str) -> dict[str, torch.Tensor]:
    """The tensors that `gyre export` writes of a finished run, from processes of its own."""
    command = [sys.executable, *launcher, "-m", "gyre_megatron", "export"]
    command += [str(run.directory), str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}: step 2 of {run.directory}, fp32\n"
    return {n: w for file in output.glob("*.safetensors") for n, w in load_file(file).items()}


def test_one_cell_of_two_ranks_trains_and_serves_with_tensor_parallelism(tmp_path: Path):
    """And what it has learnt leaves it as a checkpoint that transformers answers from."""
    words = "run.num_steps=2 cluster.num_cells=1 training.tp=2 scheduler.groups_per_step=1 scheduler.cell_capacity=16"
    with training_run(tmp_path, *[w for word in words.split() for w in ("--set", word)]) as run:
        assert run.wait(240) == 0, run.output[-4000:]
        assert run.survivors() == []
    records = run.records()
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["train/num_edges"] > 0 and records[0]["optimizer/grad_norm"] > 0
    assert all(record["logprob_gap"] <= 1e-4 for record in records)

    tensors = exported(run, tmp_path / "exported")
    (base,) = (tmp_path / "models").iterdir()
    before = load_file(base / "model.safetensors")
    assert tensors.keys() == before.keys()
    assert any(not torch.equal(tensors[name], before[name]) for name in before), "nothing learnt"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    divided = exported(run, tmp_path / "divided", *torchrun)
    assert divided.keys() == tensors.keys()
    assert all(torch.equal(divided[name], tensors[name]) for name in tensors)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    chat = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
