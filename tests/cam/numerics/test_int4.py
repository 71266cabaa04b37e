"""int4 packing and scale encoding, against words and bits written down by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffn_faas.ascend.numerics import int4, scales
from ffn_faas.errors import ModelRefused

nibbles = st.integers(-8, 7)


def test_the_low_nibble_of_a_checkpoint_byte_is_the_even_output():
    packed = torch.tensor([[0x21, 0x0F], [-128, 0x7A]], dtype=torch.int8)  # [out / 2, in]; -128 is 0x80
    assert int4.from_pairs(packed).tolist() == [[1, -1], [2, 0], [0, -6], [-8, 7]]


def test_nibble_j_of_a_word_is_column_j():
    values = torch.tensor([1, -1, 7, -8, 0, 2, 3, -3], dtype=torch.int8)
    assert int4.to_words(values).tolist() == [0xD32087F1 - (1 << 32)]


@settings(deadline=None)
@given(st.lists(st.lists(nibbles, min_size=16, max_size=16), min_size=2, max_size=6).filter(lambda v: len(v) % 2 == 0))
def test_both_packings_come_back(values):
    tensor = torch.tensor(values, dtype=torch.int8)
    assert torch.equal(int4.from_words(int4.to_words(tensor)), tensor)
    assert torch.equal(int4.from_pairs(int4.to_pairs(tensor)), tensor)


def test_columns_that_fill_no_word_are_refused():
    with pytest.raises(ModelRefused, match="12 columns of int4"):
        int4.to_words(torch.zeros(2, 12, dtype=torch.int8))


def test_scales_are_their_bits_zero_extended():
    scale = torch.tensor([1.0, -1.0, 0.0, 5 * 2.0**-149])
    assert scales.encode(scale).tolist() == [0x3F800000, 0xBF800000, 0, 5]
    assert torch.equal(scales.decode(scales.encode(scale)), scale)
    assert torch.equal(scales.decode(scales.encode(scale) | (7 << 40)), scale)


def test_every_int8_is_sixteen_times_its_high_half_and_its_low_half_and_eight():
    rows = torch.arange(-128, 128).to(torch.int8)
    high, low = scales.split(rows)
    assert (high.min(), high.max(), low.min(), low.max()) == (-8, 7, -8, 7)
    assert torch.equal(16 * high.int() + low.int() + 8, rows.int())


def test_the_compensation_is_eight_times_the_scaled_column_sum_rounded_once():
    random = np.random.default_rng(1)
    weights = random.integers(-8, 8, (3, 300, 16), np.int8)
    scale = random.uniform(0.001, 0.1, (3, 16)).astype(np.float32)
    expected = (8.0 * weights.astype(np.float64).sum(1) * scale.astype(np.float64)).astype(np.float32)
    made = scales.compensation(torch.from_numpy(weights), torch.from_numpy(scale))
    assert np.array_equal(made.numpy(), expected)
