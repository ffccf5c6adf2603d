"""Mooncake's Transfer Engine over TCP, in a network namespace of its own: it listens on all
interfaces."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LONE = "ip link set lo up && exec"


def _isolated(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    namespace = ["unshare", "-rn", "--kill-child", "sh", "-c", f'{LONE} "$@"', "sh"]
    command = [*namespace, sys.executable, "-m", "tests.dist.mooncake_jobs"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module", autouse=True)
def namespace():
    probe = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this user may not make network namespaces, and Mooncake would listen on all interfaces")


def _result(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_buckets_arrive_whole(tmp_path):
    assert _result(_isolated("swap", str(tmp_path)))["exact"] == [True] * 3


def test_a_chain_of_cells_passes_the_shard_on(tmp_path):
    exact = _result(_isolated("chain", str(tmp_path)))["exact"]
    assert exact == [[True, True, True], [True, True, False], [False, True, True]]


def test_a_dead_cell_is_an_error_in_time(tmp_path):
    result = _result(_isolated("dead", str(tmp_path)))
    assert all("processes [1] did not answer" in told for told in result["told"])
    assert result["seconds"] < 45


def test_a_joiner_reads_the_cores_weights_by_itself(tmp_path):
    result = _result(_isolated("pull", str(tmp_path)))
    assert result["exact"] == [True, True]
    assert "being written" in result["told"]
