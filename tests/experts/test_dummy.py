"""Dummy weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ffn_faas.experts.dummy import DummyWeights  # noqa: E402
from ffn_faas.experts.spec import MoESpec  # noqa: E402
from tests.data import TinyModel  # noqa: E402


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_rounded_to_their_dtype_as_torch_rounds(dtype):
    spec = MoESpec.from_config(TinyModel().config(), dtype)
    pool = torch.from_numpy(DummyWeights(spec, 3).values).view(getattr(torch, dtype))
    drawn = (np.random.default_rng(3).random(len(pool), np.float32) * 2 - 1) * np.float32(0.02)
    assert torch.equal(pool, torch.from_numpy(drawn).to(getattr(torch, dtype)))


def test_a_matrix_holds_the_pool_from_its_start_on_again_and_again():
    spec = MoESpec.from_config({**TinyModel().config(), "hidden_size": 2048, "moe_intermediate_size": 1024}, "bfloat16")
    dummy = DummyWeights(spec, 0)
    matrix = torch.empty(2048 * 1024, dtype=torch.bfloat16)
    dummy.write(matrix.data_ptr(), 1, 2, 1)
    pool = torch.from_numpy(dummy.values).view(torch.bfloat16)
    places = (dummy.start(1, 2, 1) + torch.arange(matrix.numel())) % len(pool)
    assert torch.equal(matrix, pool[places])
