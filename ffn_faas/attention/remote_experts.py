"""The routed-experts layer whose experts live on F: what it answers vLLM, and its two op calls. No vLLM imports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Rows:
    """Which rows of a layer's input this rank sends; ``rank`` and ``size`` are those of its tensor parallel group."""

    rank: int = 0
    size: int = 1
    is_slice: bool = False
    """The input is this rank's slice already (sequence-parallel MoE); else every rank holds all rows."""
    may_be_padding: bool = False
    """Some rows may carry no token: they are asked for and not sent."""


ALL_ROWS = Rows()


def run_remote(
    ops: Any,
    layer: int,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    run_shared_experts: Callable[[], None] | None,
    rows: Rows = ALL_ROWS,
) -> torch.Tensor:
    """Send ``hidden`` to F, run the shared experts meanwhile, return F's weighted sums.

    Where every tensor parallel rank holds all rows each sends its part, and the parts are gathered at the end: no
    slice is taken in the graph, whose number of rows is a symbol.

    ``hidden`` [T, H] in the model's dtype, ``weights`` [T, K] f32, ``expert_ids`` [T, K] i32 (-1 = no expert);
    returns [T, H] in the model's dtype. ``ops`` is ``torch.ops.ffn_faas``: two opaque ops, which torch.compile and
    graphs see as nodes. Blocks in the second until F has answered; raises when the session is lost.
    """
    if rows.may_be_padding:
        part, parts = (rows.rank, rows.size) if rows.is_slice else (0, 1)
        expert_ids = ops.mask_padding(expert_ids, part, parts)
    if rows.size == 1 or rows.is_slice:
        ticket = ops.dispatch(hidden, weights, expert_ids, layer)
        if run_shared_experts is not None:
            run_shared_experts()
        return ops.combine(ticket, hidden, weights, expert_ids, layer)
    ticket = ops.dispatch(hidden, weights, expert_ids, layer, rows.rank, rows.size)
    if run_shared_experts is not None:
        run_shared_experts()
    part_of_sums = ops.combine(ticket, hidden, weights, expert_ids, layer, rows.rank, rows.size)
    return ops.gather_rows(part_of_sums, hidden)
