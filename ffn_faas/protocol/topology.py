"""Which F rank owns which expert. Pure functions."""

from __future__ import annotations


def expert_counts(num_experts: int, num_ffn_ranks: int) -> list[int]:
    """How many experts of a layer each F rank owns, as even as can be; the first ranks take the remainder.

    >>> expert_counts(8, 3)
    [3, 3, 2]
    """
    if num_ffn_ranks < 1 or num_experts < num_ffn_ranks:
        raise ValueError(f"cannot split {num_experts} experts over {num_ffn_ranks} F ranks")
    base, remainder = divmod(num_experts, num_ffn_ranks)
    return [base + (rank < remainder) for rank in range(num_ffn_ranks)]


def expert_range(num_experts: int, num_ffn_ranks: int, ffn_rank: int) -> range:
    """Global ids of the experts that ``ffn_rank`` owns: contiguous, in rank order; local id = global id - start."""
    counts = expert_counts(num_experts, num_ffn_ranks)
    if not 0 <= ffn_rank < num_ffn_ranks:
        raise ValueError(f"F rank {ffn_rank} is not in a world of {num_ffn_ranks}")
    start = sum(counts[:ffn_rank])
    return range(start, start + counts[ffn_rank])
