"""The two quantizations of rows and the SwiGLU: bit-equal to the oracle, and not equal to each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ffn_faas.ascend.numerics import rows
from tests.cam import oracle


def random_rows(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dispatch_quantizes_as_the_contract_has_it(dtype):
    x = random_rows(200, 96).to(dtype)
    q, scale = rows.dispatch(x)
    expected = oracle.quantized(x.float().numpy())
    assert np.array_equal(q.numpy(), expected.q)
    assert np.array_equal(scale.numpy(), expected.scale)


def test_dispatch_by_hand():
    q, scale = rows.dispatch(torch.tensor([[254.0, -1.0, 3.0, 5.0]]))
    assert q.tolist() == [[127, 0, 2, 2]]  # mul is 0.5: halves go to the even number
    assert scale.tolist() == [2.0]


def test_the_first_matmul_quantizes_as_the_contract_has_it():
    values = random_rows(200, 96)
    q, scale = rows.activation(values)
    expected = oracle.requantized(values.numpy())
    assert np.array_equal(q.numpy(), expected.q)
    assert np.array_equal(scale.numpy(), expected.scale)


def test_the_two_forms_are_not_the_same_function():
    x = random_rows(2000, 64)
    q, scale = rows.dispatch(x)
    other_q, other_scale = rows.activation(x)
    assert 0.1 < (scale != other_scale).float().mean() < 0.5
    assert 0.3 < (q != other_q).any(1).float().mean() < 0.8
    assert (q.int() - other_q.int()).abs().max() <= 1
    torch.testing.assert_close(scale, other_scale, rtol=1e-6, atol=1e-9)


def test_a_row_of_zeros_stays_zero_between_the_products():
    q, scale = rows.activation(torch.zeros(1, 8))
    assert q.tolist() == [[0] * 8]
    assert scale.tolist() == [0.0]


@pytest.mark.parametrize("limit", [None, 1.0])
def test_swiglu_clamps_only_when_told_to(limit):
    values = 3 * random_rows(50, 64)
    made = rows.swiglu(values, limit).numpy()
    assert np.array_equal(made, oracle.swiglu(values.numpy(), limit))
    assert (np.abs(made).max() > 1) == (limit is None)
