"""The numbers that both sides of a CAM system share, what follows from them, and which of them cannot work. Pure."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ffn_faas.errors import UsageError

MIB = 1 << 20
MAX_SEQUENCE = 262144
"""Operators' limit of max_seq_len, and rows of a receive buffer at BATCH_SIZE_FACTOR 1."""
MAX_MEGA_ASSIGNMENTS = 65535
"""Pull counts a rank's (token, expert) pairs in 16 bits."""
DEFAULT_KERNEL_WINDOW_MIB = 408
"""LCCL_BUFFER_SIZE where it is not set."""
DEFAULT_HCCL_BUFFER_MIB = {"attention": 1024, "ffn": 4096}


@dataclass(frozen=True)
class CamShape:
    """World ranks are [A0 .. A(A-1), F0 .. F(M-1)]; ``tensor_parallel`` A ranks send the parts of one batch."""

    attention_ranks: int
    ffn_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    max_num_batched_tokens: int
    tensor_parallel: int = 1
    dynamic_quant: bool = True
    mega: bool = False

    @property
    def world_size(self) -> int:
        return self.attention_ranks + self.ffn_ranks

    @property
    def experts_per_rank(self) -> int:
        return -(-self.num_experts // self.ffn_ranks)

    @property
    def groups(self) -> int:
        """Data parallel groups of A ranks; each gives an F rank chunks of its own."""
        return self.attention_ranks // self.tensor_parallel

    @property
    def rows_per_rank(self) -> int:
        """Most rows that one A rank dispatches at once."""
        return self.max_num_batched_tokens // self.tensor_parallel

    def ffn_world_rank(self, ffn_rank: int) -> int:
        return self.attention_ranks + ffn_rank

    def check(self) -> None:
        """Raise UsageError for numbers that the operators cannot serve."""
        for bad, text, remedy in self._rules():
            if bad:
                raise UsageError(f"npu-async-cam: {text}", remedy=remedy)

    def _rules(self) -> tuple[tuple[bool, str, str], ...]:
        tokens, parts, experts, ffn = (
            self.max_num_batched_tokens,
            self.tensor_parallel,
            self.num_experts,
            self.ffn_ranks,
        )
        rows = self.rows_per_rank
        return (
            (
                experts % ffn > 0,
                f"{experts} experts do not divide over {ffn} F ranks",
                "start a number of F ranks that divides the experts",
            ),
            (
                self.attention_ranks % parts > 0,
                f"attn_ranks_per_dp {parts} does not divide {self.attention_ranks} A ranks (num_attention_ranks)",
                "make attn_ranks_per_dp the tensor parallel size of Attention",
            ),
            (self.hidden_size % 32 > 0, f"hidden size {self.hidden_size} is no multiple of 32", "serve another model"),
            (
                not parts <= tokens <= MAX_SEQUENCE,
                f"max_num_batched_tokens is {tokens}, {parts} to {MAX_SEQUENCE} are possible",
                "give both sides a --max-num-batched-tokens in between",
            ),
            (
                tokens % parts > 0,
                f"max_num_batched_tokens {tokens} does not divide over {parts} ranks (attn_ranks_per_dp)",
                f"for example {tokens // parts * parts or parts}",
            ),
            (
                self.mega and not self.dynamic_quant,
                "ffn_mega_moe needs dynamicQuant 1",
                "set dynamicQuant to 1 on both sides, or leave ffn_mega_moe out",
            ),
            (
                self.mega and rows * self.top_k > MAX_MEGA_ASSIGNMENTS,
                f"ffn_mega_moe: {tokens} tokens / {parts} ranks x top-k {self.top_k} is above {MAX_MEGA_ASSIGNMENTS}",
                f"lower max_num_batched_tokens to {MAX_MEGA_ASSIGNMENTS // self.top_k * parts}",
            ),
        )

    def check_capacity(self, rows: int) -> None:
        """An expert that every token of a group chose must fit into one chunk of ``rows``: nothing recovers later.

        Pull has no such chunks.
        """
        if not self.mega and rows < self.max_num_batched_tokens:
            raise UsageError(
                f"npu-async-cam: a receive buffer holds {rows} rows (BATCH_SIZE_FACTOR), one expert may get "
                f"{self.max_num_batched_tokens}",
                remedy=f"raise BATCH_SIZE_FACTOR to {self.max_num_batched_tokens / MAX_SEQUENCE:.6g} or more, "
                "or lower max_num_batched_tokens on both sides",
            )

    def attention_window_bytes(self) -> int:
        """What A's communication window must hold at least."""
        ffn, rows = self.ffn_ranks, self.rows_per_rank
        return (
            _round_up(4 * (ffn + self.num_experts) * 48)
            + _round_up(4 * ffn)
            + _round_up(2 * self.hidden_size * rows * self.top_k)
            + 32
        )

    def ffn_window_bytes(self) -> int:
        """What F's communication window must hold at least."""
        rows = self.rows_per_rank
        row = self.hidden_size + 32 if self.dynamic_quant else 2 * self.hidden_size
        of_each = (
            _round_up(40)
            + 2 * _round_up(4 * self.experts_per_rank)
            + _round_up(row * rows)
            + _round_up(2 * rows * self.top_k)
        )
        return self.attention_ranks * of_each + 32

    def check_windows(self, side: str, kernel_window_mib: int, hccl_buffer_mib: int) -> None:
        """Raise UsageError when the window of ``side`` (attention or ffn) is smaller than its batches need."""
        needed = self.attention_window_bytes() if side == "attention" else self.ffn_window_bytes()
        for name, size in (("LCCL_BUFFER_SIZE", kernel_window_mib), ("hccl_buffer_size", hccl_buffer_mib)):
            if size * MIB < needed:
                raise UsageError(
                    f"npu-async-cam: the {side} window needs {needed} bytes, {name} is {size} MiB",
                    remedy=f"set {name} to {math.ceil(needed / MIB)} or more, or lower max_num_batched_tokens",
                )


def receive_rows(factor: float) -> int:
    """Rows of F's receive buffer, as the operators reckon them. Raises UsageError for a factor they refuse."""
    single = struct.unpack("f", struct.pack("f", factor))[0] if 0 < factor <= 1 else 0.0
    rows = int(MAX_SEQUENCE * single)
    if rows < 1:
        raise UsageError(
            f"BATCH_SIZE_FACTOR is {factor:g}, which leaves no row", remedy="give a number above 0, at most 1"
        )
    return rows


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 32) * 32
