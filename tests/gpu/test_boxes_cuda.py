"""The CUDA path of copy_boxes and checksum_boxes against the plain reference. Run: pytest -m gpu
tests/gpu."""

from __future__ import annotations

import pytest
import torch

from gyre_megatron.ops.boxes import (
    checksum_boxes,
    checksum_boxes_reference,
    copy_boxes,
    copy_boxes_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TABLE = [
    [0, 0, 0, 16, 3, 40, 256, 40 * 512, 512, 1, 40 * 300, 300, 1],  # rows, aligned on one side only
    [0, 61440, 0, 40000, 1, 64, 96, 0, 1, 64, 0, 96, 1],  # a transposition
    [0, 70000, 0, 50001, 1, 1, 4097, 0, 0, 1, 0, 0, 1],  # an unaligned run
]


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference(source_dtype, target_dtype):
    source, table = torch.randn(80_000).to(source_dtype), torch.tensor(TABLE)
    expected = torch.zeros(60_000, dtype=target_dtype)
    copy_boxes_reference([source], [expected], table)
    found = torch.zeros_like(expected, device="cuda")
    copy_boxes([source.cuda()], [found], table)
    assert torch.equal(found.cpu(), expected)
    sums = checksum_boxes([source.cuda()], [found], table)
    assert sums == checksum_boxes_reference([source], [expected], table)


def test_many_boxes_in_one_launch():
    source = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    rows = [[0, i * 1024, 0, (4095 - i) * 1024, 1, 1, 1024, 0, 0, 1, 0, 0, 1] for i in range(4096)]
    target = torch.zeros_like(source)
    copy_boxes([source], [target], torch.tensor(rows))
    assert torch.equal(target, source.flip(0))


def test_device_to_page_locked_shared_memory_and_back(tmp_path):
    from gyre_megatron.weights.shared_memory import map_file, reserve_file

    path = tmp_path / "slot"
    with path.open("wb") as file:
        reserve_file(file.fileno(), 1 << 20)
    slot = map_file(path, 1 << 20)
    source = torch.randn(1 << 18, device="cuda")
    table = torch.tensor([[0, 0, 0, 0, 1, 512, 512, 0, 512, 1, 0, 1, 512]])  # transposed on the way
    copy_boxes([source], [slot.view(torch.float32)], table)
    torch.cuda.synchronize()
    assert torch.equal(
        slot.view(torch.float32).reshape(512, 512), source.cpu().reshape(512, 512).t()
    )
    back = torch.zeros_like(source)
    copy_boxes([slot.view(torch.float32)], [back], table)
    assert torch.equal(back, source)
