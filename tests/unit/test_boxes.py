"""copy_boxes and checksum_boxes against their plain references, and the algebra of boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.ops.boxes import (
    box_checksum,
    checksum_boxes,
    checksum_boxes_reference,
    copy_boxes,
    copy_boxes_reference,
    copy_boxes_with_checksums,
    wrap64,
)
from gyre_megatron.weights.boxes import Box, grid_cells, intersect, subtract

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def tables(draw):
    """Tensors and a table of boxes with arbitrary (permuted, padded) strides on either side."""
    rows, sources, targets = [], 0, 0
    for _ in range(draw(st.integers(1, 5))):
        shape = [draw(st.integers(1, 9)) for _ in range(3)]
        layouts = []
        for _ in range(2):
            order = draw(st.permutations(range(3)))
            strides, step = [0, 0, 0], 1
            for dim in order:
                strides[dim] = step
                step *= shape[dim] + draw(st.integers(0, 2))
            layouts.append((strides, step))
        rows.append([0, sources, 0, targets, *shape, *layouts[0][0], *layouts[1][0]])
        sources, targets = sources + layouts[0][1], targets + layouts[1][1]
    return sources, targets, torch.tensor(rows)


@settings(max_examples=150, deadline=None)
@given(tables(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_copy_and_checksum_equal_the_reference(case, source_dtype, target_dtype):
    num_sources, num_targets, table = case
    source = torch.randn(num_sources).to(source_dtype)
    expected, found = torch.zeros(2, num_targets, dtype=target_dtype).unbind(0)
    copy_boxes_reference([source], [expected], table)
    copy_boxes([source], [found], table)
    assert torch.equal(expected, found)
    want = checksum_boxes_reference([source], [found], table)
    assert checksum_boxes([source], [found], table) == want
    again = torch.zeros(num_targets, dtype=target_dtype)
    assert copy_boxes_with_checksums([source], [again], table) == want
    assert torch.equal(expected, again)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("numel", [2, 4097, 70_001, 9 << 20])
def test_long_runs_equal_the_reference(dtype, numel):
    """Runs take another way than short boxes, and long ones go past the caches."""
    source = torch.randint(0, 256, (numel * dtype.itemsize + 8,), dtype=torch.uint8)
    source = source[: numel * dtype.itemsize].view(dtype)
    table = torch.tensor([[0, 1, 0, 3, 1, 1, numel - 1, 0, 0, 1, 0, 0, 1]])
    found, expected = (torch.zeros(numel + 3, dtype=dtype) for _ in range(2))
    copy_boxes_reference([source], [expected], table)
    sums = copy_boxes_with_checksums([source], [found], table)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    there = table.clone()
    there[:, 1] = 3  # what lies in the target has the sum of what was read
    assert sums == checksum_boxes([expected], [expected], there)
    if dtype in DTYPES:
        assert sums == checksum_boxes_reference([source], [found], table)


def test_a_checksum_past_the_largest_position_equals_the_reference():
    """Weights of positions repeat after 2**31 elements."""
    source = torch.randn(3000).bfloat16()
    target = torch.empty(0, dtype=torch.bfloat16)
    table = torch.tensor([[0, 0, 0, 2**31 - 1500, 1, 1, 3000, 0, 0, 1, 0, 0, 1]])
    assert checksum_boxes([source], [target], table) == checksum_boxes_reference(
        [source], [target], table
    )


def test_large_boxes_run_on_threads_and_equal_the_reference():
    source = torch.randn(3, 700, 1111)
    target, expected = torch.zeros(2, 1111, 3, 700).unbind(0)
    table = torch.tensor([[0, 0, 0, 0, 3, 700, 1111, 700 * 1111, 1111, 1, 700, 1, 2100]])
    copy_boxes([source], [target], table)
    copy_boxes_reference([source], [expected], table)
    assert torch.equal(target, expected)
    assert torch.equal(target, source.permute(2, 0, 1))


def test_checksum_adds_up_over_disjoint_senders_and_sees_position():
    tensor = torch.randn(64, 32)
    halves = [
        torch.tensor([[0, i * 1024, 0, i * 1024, 1, 32, 32, 0, 32, 1, 0, 32, 1]]) for i in (0, 1)
    ]
    parts = [checksum_boxes([tensor], [tensor], half)[0] for half in halves]
    assert wrap64(sum(parts)) == box_checksum(tensor)
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    assert box_checksum(swapped) != box_checksum(tensor)


def test_box_outside_its_tensor_is_refused():
    tensor = torch.zeros(10)
    row = [0, 5, 0, 0, 1, 1, 6, 0, 0, 1, 0, 0, 1]
    with pytest.raises(RuntimeError, match="ends at element 10 of source 0"):
        copy_boxes([tensor], [torch.zeros(10)], torch.tensor([row]))


def test_opcheck():
    source, target = torch.randn(4, 8), torch.zeros(4, 8)
    table = torch.tensor([[0, 0, 0, 0, 1, 4, 8, 0, 8, 1, 0, 8, 1]])
    for op in (
        torch.ops.gyre.copy_boxes.default,
        torch.ops.gyre.checksum_boxes.default,
        torch.ops.gyre.copy_boxes_with_checksums.default,
    ):
        torch.library.opcheck(op, ([source], [target], table), test_utils=("test_schema",))


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=3, max_size=3).map(
    lambda dims: Box(tuple(s for s, _ in dims), tuple(n for _, n in dims))
)


def _elements(box: Box) -> set[tuple[int, ...]]:
    import itertools

    return set(
        itertools.product(*(range(s, s + n) for s, n in zip(box.start, box.shape, strict=True)))
    )


@settings(max_examples=200, deadline=None)
@given(boxes, boxes)
def test_intersection_and_difference_are_sets(a, b):
    common = intersect(a, b)
    assert (_elements(common) if common else set()) == _elements(a) & _elements(b)
    if common:
        rest = subtract(a, common)
        assert sum(box.numel for box in rest) == a.numel - common.numel
        assert set().union(*map(_elements, rest)) == _elements(a) - _elements(b)


def test_grid_cells_cover_once():
    cells = grid_cells((7, 5), (3, 2))
    assert sum(cell.numel for cell in cells) == 35
    assert len(set().union(*map(_elements, cells))) == 35
