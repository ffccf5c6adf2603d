"""The written SGLang layout against a dry run of SGLang's own modules, for every family, also those
no CPU serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gyre_megatron.weights.messages import decode_status
from gyre_megatron.weights.sglang import SglangLayout
from gyre_megatron.weights.shadow_plan import engine_layout

CASES = [
    ("dense", 8, 1, 1),
    ("dense", 2, 1, 1),
    ("tied", 2, 1, 1),
    ("moe", 4, 4, 1),
    ("moe", 4, 1, 2),
    ("mla", 4, 2, 1),
    ("mla", 2, 1, 2),
    ("hybrid", 4, 2, 1),
    ("hybrid", 2, 1, 1),
]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Each case's first and last rank as SGLang's modules report them."""
    from tests.support.hf_configs import write_config
    from tests.support.megatron_models import ARCHITECTURES

    folder = tmp_path_factory.mktemp("geometry")
    names = [
        f"{write_config(ARCHITECTURES[f], folder / f)}:{tp}:{ep}:{dp}" for f, tp, ep, dp in CASES
    ]
    command = [sys.executable, "-m", "tests.support.sglang_meta", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        [
            decode_status((folder / f"{number}-{rank}.json").read_bytes())
            for rank in sorted({0, case[1] - 1})
        ]
        for number, case in enumerate(CASES)
    ]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES]
)
def test_written_layout_is_what_the_modules_do(probed, number):
    from tests.support.megatron_models import ARCHITECTURES

    family, tp, ep, dp = CASES[number]
    written, found = SglangLayout(ARCHITECTURES[family], tp, ep, dp), engine_layout(probed[number])
    for index, rank in enumerate(sorted({0, tp - 1})):  # the ranks that were probed
        shapes = {t.key: t.shape for t in written.tensors(rank)}
        assert shapes == {t.key: t.shape for t in found.tensors(index)}
        places = [
            {(p.name, p.start, p.shape, p.tensor, p.offset) for p in local_boxes}
            for local_boxes in (written.local_boxes(rank), found.local_boxes(index))
        ]
        assert places[0] == places[1]
