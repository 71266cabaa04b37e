"""int4 weights: two to a byte as the checkpoint has them, eight to an int32 word as the operators take them.

Unpacked, a weight is an int8 between -8 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffn_faas.errors import ModelRefused

if TYPE_CHECKING:
    import torch

PER_WORD = 8


def from_pairs(packed: torch.Tensor) -> torch.Tensor:
    """int8 [..., out / 2, in] -> int8 [..., out, in]: the low nibble is the even output channel.

    As msModelSlim writes ``W4A8_DYNAMIC``; which nibble comes first is inferred, not stated (docs/ascend.md).
    """
    import torch

    both = torch.stack([_signed(packed & 15), _signed((packed >> 4) & 15)], dim=-2)
    return both.flatten(-3, -2)


def to_pairs(values: torch.Tensor) -> torch.Tensor:
    """The inverse of ``from_pairs``, for whoever writes a checkpoint; [..., out, in] with an even number of outputs."""
    even, odd = values[..., 0::2, :], values[..., 1::2, :]
    return (even & 15) | (odd << 4)


def to_words(values: torch.Tensor) -> torch.Tensor:
    """int8 [..., n] -> int32 [..., n / 8]: nibble j of word i is column 8 i + j. ModelRefused unless 8 divides n."""
    import torch

    if values.shape[-1] % PER_WORD:
        raise ModelRefused(
            f"{values.shape[-1]} columns of int4 do not fill int32 words",
            remedy="the operators take hidden and intermediate sizes divisible by 8 alone",
        )
    nibbles = (values.unflatten(-1, (-1, PER_WORD)) & 15).to(torch.int64)
    shifts = 4 * torch.arange(PER_WORD, device=values.device)
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_words``: int32 [..., n / 8] -> int8 [..., n]."""
    import torch

    shifts = 4 * torch.arange(PER_WORD, device=words.device, dtype=torch.int32)
    nibbles = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.int8)
    return _signed(nibbles).flatten(-2)


def _signed(nibbles: torch.Tensor) -> torch.Tensor:
    return (nibbles ^ 8) - 8
