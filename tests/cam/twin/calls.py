"""The operators' long argument lists, from the few numbers of a test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ffn_faas.ascend.op_module import OpModule


@dataclass(frozen=True)
class Sizes:
    attention: int = 2
    ffn: int = 2
    experts: int = 3  # of one F rank
    tp: int = 1
    hidden: int = 64
    top_k: int = 2
    max_seq_len: int = 32
    quant: int = 0
    dtype: torch.dtype = torch.bfloat16
    group: str = "127.0.0.1%eth0_60000_0"

    @property
    def world(self) -> int:
        return self.attention + self.ffn

    @property
    def all_experts(self) -> int:
        return self.ffn * self.experts

    @property
    def most_batch(self) -> int:
        return self.max_seq_len // self.tp

    def but(self, **changes: Any) -> Sizes:
        return replace(self, **changes)


def comm() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float16)


def dispatch_send(
    ops: OpModule, sizes: Sizes, rank: int, layer: int, x: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    s = sizes
    return ops.dispatch_send(
        x, ids, comm().to(x.device), 0, s.max_seq_len, x.shape[0], s.hidden, s.top_k, s.ffn, s.attention, s.experts,
        rank, s.world, layer, s.tp, s.quant, s.group,
    )  # fmt: skip


def dispatch_recv(ops: OpModule, sizes: Sizes, ffn_rank: int, device: str = "cpu") -> list[torch.Tensor]:
    s = sizes
    anchor = torch.zeros(1, dtype=s.dtype, device=device)
    return ops.dispatch_recv(
        anchor, comm().to(device), 0, s.max_seq_len, s.hidden, s.top_k, s.ffn, s.attention, s.experts,
        s.attention + ffn_rank, s.world, s.tp, s.quant, s.group,
    )  # fmt: skip


def combine_send(
    ops: OpModule, sizes: Sizes, ffn_rank: int, rows: torch.Tensor, batch_info: torch.Tensor
) -> torch.Tensor:
    s = sizes
    return ops.combine_send(
        rows, comm().to(rows.device), batch_info, 0, s.max_seq_len, s.hidden, s.top_k, s.ffn, s.attention, s.experts,
        s.attention + ffn_rank, s.world, s.tp, s.group,
    )  # fmt: skip


def combine_recv(ops: OpModule, sizes: Sizes, rank: int, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    s = sizes
    anchor = torch.zeros(1, dtype=s.dtype, device=ids.device)
    return ops.combine_recv(
        anchor, ids, weights, comm().to(ids.device), 0, ids.shape[0], s.hidden, s.top_k, s.ffn, s.attention, s.experts,
        rank, s.world, s.group,
    )  # fmt: skip


def inputs(sizes: Sizes, batch: int, seed: int, experts: range | None = None) -> tuple[torch.Tensor, ...]:
    """x [batch, H], ids [batch, K] without a repetition inside a row, weights [batch, K]; ``experts``: those chosen."""
    generator = torch.Generator().manual_seed(seed)
    chosen = experts or range(sizes.all_experts)
    x = torch.randn(batch, sizes.hidden, generator=generator).to(sizes.dtype)
    order = torch.rand(batch, len(chosen), generator=generator).argsort(1)[:, : sizes.top_k]
    ids = (order + chosen.start).to(torch.int32)
    return x, ids, torch.rand(batch, sizes.top_k, generator=generator)
