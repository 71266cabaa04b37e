from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ffn_faas.demo.layer_errors import exact_rows  # noqa: E402
from ffn_faas.experts.checkpoint import Checkpoint  # noqa: E402
from ffn_faas.experts.kernels.torch_kernel import TorchKernel  # noqa: E402
from ffn_faas.experts.loader import load_experts  # noqa: E402
from ffn_faas.experts.spec import MoESpec  # noqa: E402
from tests import oracle  # noqa: E402
from tests.data import TinyModel, routing  # noqa: E402


def test_the_yardstick_of_the_demo_agrees_with_that_of_the_tests(tmp_path: Path) -> None:
    model = TinyModel(layers=1)
    spec = MoESpec.from_model_dir(model.write(tmp_path))
    kernel = TorchKernel(spec)
    load_experts(spec, Checkpoint.open(tmp_path), range(model.experts), kernel, lambda done, total: None)
    hidden = torch.randn(20, model.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = routing(20, model.experts, model.top_k, seed=0)
    expected = oracle.moe(hidden, *model.expert_weights(0), ids, weights)
    torch.testing.assert_close(exact_rows(kernel, hidden, ids, weights), torch.from_numpy(expected))
