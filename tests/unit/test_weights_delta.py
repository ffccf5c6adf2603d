"""Deltas between versions: bit for bit what was sent, as small as the form allows, and an error
where the receiver held something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.delta import BLOCK, EncodedChunk, Form, apply, checksum, encode


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def changed(base: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """A copy of the bytes in which about `share` of the elements of two bytes differ."""
    generator = torch.Generator().manual_seed(seed)
    words = base.clone().view(torch.int16)
    chosen = torch.rand(len(words), generator=generator) < share
    words[chosen] ^= torch.randint(1, 2**15, (int(chosen.sum()),), generator=generator).short()
    return words.view(torch.uint8)


@settings(deadline=None, max_examples=80)
@given(
    num=st.integers(0, 5000),
    size=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_what_arrives_is_what_was_sent(num: int, size: int, share: float, seed: int):
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.integers(0, 256, num * size, dtype=np.uint8))
    current = base.clone()
    elements = current.numpy().reshape(num, size)
    chosen = rng.random(num) < share
    elements[chosen] = rng.integers(0, 256, (int(chosen.sum()), size), dtype=np.uint8)
    target = base.clone()
    encoded = encode(current, base, size)
    apply(encoded, target, size)
    assert torch.equal(target, current)
    assert len(encoded.payload) <= current.numel()


@pytest.mark.parametrize(
    ("share", "form", "largest"),
    [
        (0.0, Form.SAME, 0.0),
        (0.03, Form.PLACES, 0.062),
        (0.2, Form.MASK, 0.27),
        (1.0, Form.WHOLE, 1.0),
    ],
)
def test_the_density_chooses_the_form(share: float, form: Form, largest: float):
    base = as_bytes(
        torch.randn(5 * BLOCK + 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    )
    current = changed(base, share, seed=1)
    encoded = encode(current, base, 2)
    assert encoded.form is form
    assert len(encoded.payload) <= largest * current.numel()


def test_bits_without_a_number_arrive_too():
    values = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1.0])
    base = as_bytes(torch.tensor([1.0, 1.0, 0.0, -0.0, 1.0]))
    target = base.clone()
    apply(encode(as_bytes(values), base, 4), target, 4)
    assert torch.equal(target, as_bytes(values))


def test_a_thousand_versions():
    current = as_bytes(torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16())
    target = current.clone()
    for version in range(1000):
        new = changed(current, 0.03, seed=version)
        apply(encode(new, current, 2), target, 2)
        assert torch.equal(target, new)
        current = new


def test_several_versions_behind_is_one_delta():
    first = as_bytes(torch.randn(3000).bfloat16())
    latest = changed(changed(first, 0.03, seed=1), 0.03, seed=2)
    target = first.clone()
    encoded = encode(latest, first, 2)
    apply(encoded, target, 2)
    assert torch.equal(target, latest) and encoded.form is Form.PLACES


def test_no_base_is_sent_whole():
    current = as_bytes(torch.randn(100))
    encoded = encode(current, None, 4)
    target = torch.zeros_like(current)
    apply(encoded, target, 4)
    assert encoded.form is Form.WHOLE and torch.equal(target, current)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.2])
def test_another_base_is_noticed(share: float):
    base = as_bytes(torch.randn(3000).bfloat16())
    encoded = encode(changed(base, share, seed=1), base, 2)
    other = changed(base, 0.001, seed=9)
    if torch.equal(other, base):  # the draw may change nothing
        other[0] ^= 1
    with pytest.raises(TransferError, match="did not hold the version"):
        apply(encoded, other, 2)


@pytest.mark.parametrize("form", [Form.PLACES, Form.MASK, Form.WHOLE])
def test_a_payload_cut_short_is_refused(form: Form):
    base = as_bytes(torch.randn(3000).bfloat16())
    current = changed(base, {Form.PLACES: 0.03, Form.MASK: 0.2, Form.WHOLE: 1.0}[form], seed=1)
    encoded = encode(current, base, 2)
    assert encoded.form is form
    cut = EncodedChunk(form, encoded.payload[:-2].copy(), encoded.checksum)
    with pytest.raises(TransferError, match="does not fit"):
        apply(cut, base.clone(), 2)


def test_sizes_that_do_not_agree():
    with pytest.raises(TransferError, match="no whole number of elements"):
        encode(torch.zeros(7, dtype=torch.uint8), None, 2)
    with pytest.raises(TransferError, match="against a base of"):
        encode(torch.zeros(8, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8), 2)


def test_the_checksum_is_of_all_bytes():
    data = torch.arange(19, dtype=torch.uint8)
    for place in range(len(data)):
        other = data.clone()
        other[place] ^= 64
        assert checksum(other) != checksum(data)
