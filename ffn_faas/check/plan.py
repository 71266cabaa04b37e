"""How many bytes each F rank would hold, and where. Pure arithmetic over a MoESpec."""

from __future__ import annotations

from dataclasses import dataclass

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ITEM_LIMIT
from ffn_faas.experts.spec import ELEMENT_SIZES, MoESpec
from ffn_faas.protocol.topology import expert_range
from ffn_faas.protocol.window import window_layout

_F32 = 4


@dataclass(frozen=True)
class Question:
    """What is to be served: ``attention_ranks`` is the number of A ranks of each session."""

    ffn_ranks: int
    capacity: int
    sessions: int = 1
    attention_ranks: int = 1


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one F rank: its experts, in every layer; the windows of all sessions; the kernel's own memory."""

    rank: int
    first_expert: int
    last_expert: int
    num_experts: int
    """Of each layer."""
    layers: int
    weight_bytes: int
    window_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.window_bytes + self.workspace_bytes


def plan(spec: MoESpec, question: Question) -> list[RankPlan]:
    """One plan per F rank. Raises ValueError when there are more ranks than experts."""
    ranks = []
    for rank in range(question.ffn_ranks):
        owned = expert_range(spec.num_experts, question.ffn_ranks, rank)
        ranks.append(
            RankPlan(
                rank=rank,
                first_expert=owned.start,
                last_expert=owned.stop - 1,
                num_experts=len(owned),
                layers=spec.num_layers,
                weight_bytes=len(owned) * spec.num_layers * spec.expert_bytes,
                window_bytes=question.sessions * question.attention_ranks * window_bytes(spec, question.capacity),
                workspace_bytes=workspace_bytes(spec, question, len(owned)),
            )
        )
    return ranks


def window_bytes(spec: MoESpec, capacity: int) -> int:
    """Shared memory of one (A rank, F rank) pair: dispatch and combine windows of one stage."""
    element = ELEMENT_SIZES[spec.dtype]
    return window_layout(WindowGeometry(1, capacity, spec.hidden_size, spec.top_k, element)).nbytes


def workspace_bytes(spec: MoESpec, question: Question, num_local_experts: int) -> int:
    """Bound for the largest item: rows of merged posts side by side, then, in float32, input, gate and up, activation
    and result of each expert that a row has here.
    """
    links = question.sessions * question.attention_ranks
    rows = min(ITEM_LIMIT, question.capacity * links)
    merged = spec.hidden_size * (ELEMENT_SIZES[spec.dtype] + _F32) + 2 * _F32 * spec.top_k if links > 1 else 0
    computed = min(spec.top_k, num_local_experts) * _F32 * (2 * spec.hidden_size + 3 * spec.intermediate_size)
    return rows * (merged + computed)
