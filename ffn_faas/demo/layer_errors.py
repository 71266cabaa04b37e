"""How exact F is, layer by layer, beside stock vLLM's kernel: both against the definition in float64.

The demo attaches to F as an Attention rank of its own, sends rows over the real connector, and computes the same rows
with vLLM's operator on all experts. Rows are unit normal, as RMSNorm leaves them; routing is that of a softmax router.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import loader, ops
from ffn_faas.attention.remote_experts import run_remote
from ffn_faas.experts.architectures import SWIGLU_OAI_LIMIT
from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.kernels.activations import SWIGLU_OAI_ALPHA
from ffn_faas.experts.kernels.torch_kernel import TorchKernel
from ffn_faas.experts.kernels.vllm_kernel import VllmKernel
from ffn_faas.experts.loader import load_experts

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.kernels.base import ExpertKernel
    from ffn_faas.experts.spec import MoESpec

log = logging.getLogger(__name__)
ROWS = 64


class LayerError(NamedTuple):
    """|y - exact| / |exact| over all rows of one layer, exact in float64 from the checkpoint's weights."""

    layer: str
    error: float
    stock_error: float

    @property
    def ratio(self) -> float:
        return self.error / self.stock_error


def layer_errors(model: Path, port: int, patience_s: float = 60.0) -> list[LayerError]:
    """Errors of the F service at ``port``, which serves ``model``, for every layer. Blocks; raises FfnError."""
    import torch

    block = AfdBlock(role="attention", port=port, afd_process_group_timeout_s=patience_s)
    described = loader.Model.read(str(model), None, "auto", dummy=False)
    spec = described.spec
    attached = loader.open_session(
        block, described, loader.attach_message(block, described, "ffn_faas demo", ROWS), log
    )
    session, checkpoint = attached.session, Checkpoint.open(model)
    try:
        session.declare_layers(list(spec.layers))
        session.wait_ready(patience_s)
        ops.bind(session.client)
        errors = []
        for layer, name in enumerate(spec.layers):
            alone = replace(spec, layers=(name,))
            rows = _rows(spec, seed=layer)
            exact = exact_rows(_filled(TorchKernel(alone), checkpoint), *rows)
            ours = run_remote(torch.ops.ffn_faas, layer, rows.hidden, rows.weights, rows.ids, None)
            stock = torch.empty(ROWS, spec.hidden_size)
            _filled(VllmKernel(alone), checkpoint).compute(0, rows.hidden, rows.ids, rows.weights, stock)
            errors.append(LayerError(name, _distance(ours, exact), _distance(stock.to(ours.dtype), exact)))
    finally:
        ops.bind(None)
        session.close()
    return errors


class _Rows(NamedTuple):
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def _rows(spec: MoESpec, seed: int) -> _Rows:
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, spec.hidden_size, generator=generator).to(getattr(torch, spec.dtype))
    weights, ids = torch.randn(ROWS, spec.num_experts, generator=generator).softmax(-1).topk(spec.top_k)
    return _Rows(hidden, ids.int(), (weights / weights.sum(-1, keepdim=True)).contiguous())


def _filled(kernel: ExpertKernel, checkpoint: Checkpoint) -> ExpertKernel:
    load_experts(kernel.spec, checkpoint, range(kernel.spec.num_experts), kernel, lambda done, total: None)
    return kernel


def exact_rows(
    weights_of: ExpertKernel, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] float64, from the definition; ``weights_of`` holds one layer as torch has it. One expert at a time."""
    import torch

    spec = weights_of.spec
    result = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        matrices = [weights_of.matrix_buffer(0, expert, number).double() for number in spec.matrices]
        gate_matrix, up_matrix, down_matrix, *biases = matrices
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        x = hidden[rows].double()
        gate, up = x @ gate_matrix.T, x @ up_matrix.T
        if biases:
            gate, up = gate + biases[0], up + biases[1]
        if spec.activation == "silu":
            inner = gate * torch.sigmoid(gate) * up
        else:
            gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
            inner = gate * torch.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)
        out = inner @ down_matrix.T
        if biases:
            out = out + biases[2]
        result.index_add_(0, rows, out * weights[rows, slots].double().unsqueeze(1))
    return result


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())
