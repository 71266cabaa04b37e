"""The routed-experts layer whose experts live on F: what it answers vLLM, and its two op calls. No vLLM imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _PrepareFinalize:
    def __init__(self, indices_dtype: torch.dtype) -> None:
        self._indices_dtype = indices_dtype

    def topk_indices_dtype(self) -> torch.dtype:
        return self._indices_dtype


class _FusedExperts:
    consumes_expert_mask = False
    """The layer keeps vLLM's canonical expert map; nothing here reads it."""


class RemoteKernel:
    """Stands where vLLM looks for a layer's MoE kernel; only its answers matter.

    Its presence keeps vLLM from gathering tokens over DP ranks; ``output_is_reduced`` keeps it from summing routed
    output over TP ranks, which F has already done; shared experts run inside ``apply``.
    """

    is_monolithic = False
    can_overlap_shared_experts = True

    def __init__(self, indices_dtype: torch.dtype) -> None:
        self.prepare_finalize = _PrepareFinalize(indices_dtype)
        self.fused_experts = _FusedExperts()

    def output_is_reduced(self) -> bool:
        return True

    def supports_lora(self) -> bool:
        return False


def run_remote(
    ops: Any,
    layer: int,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    run_shared_experts: Callable[[], None] | None,
) -> torch.Tensor:
    """Send ``hidden`` to F, run the shared experts meanwhile, return F's weighted sums.

    ``hidden`` [T, H] in the model's dtype, ``weights`` [T, K] f32, ``expert_ids`` [T, K] i32 (-1 = no expert);
    returns [T, H] in the model's dtype. ``ops`` is ``torch.ops.ffn_faas``: two opaque ops, which torch.compile and
    graphs see as nodes. Blocks in the second until F has answered; raises when the session is lost.
    """
    ticket = ops.dispatch(hidden, weights, expert_ids, layer)
    if run_shared_experts is not None:
        run_shared_experts()
    return ops.combine(ticket, hidden, weights, expert_ids, layer)
