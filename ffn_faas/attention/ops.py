"""The two torch ops between A and F, ``torch.ops.ffn_faas.dispatch`` and ``combine``: opaque nodes in every graph.

    ticket = dispatch(x, topk_weights, topk_ids, layer, part=0, parts=1)            sends, returns at once
    out = combine(ticket, x, topk_weights, topk_ids, layer, part=0, parts=1)        waits for all F ranks

With ``parts`` > 1 only rows [part * c, min(T, (part + 1) * c)) of the inputs are sent, c = ceil(T / parts), and out
has c rows; rows that the inputs do not have are zero. A part without rows is a post too.

x [T, H] bf16, f16 or f32 on the CPU; topk_weights [T, K] (made f32); topk_ids [T, K] i32 or i64 global expert ids, -1 =
no expert; layer: the handle that ``AttentionClient.set_layers`` numbers; ticket i64 [2] = stage, T; out like x. Their
errors are RuntimeErrors: a session's end, a wrong shape, an id out of range.

    ones = unit_weights(topk_weights)        weights of rows that the router's weights are multiplied into already

is opaque too, so that a compiler keeps ``topk_weights`` as a tensor, as it does beside vLLM's own kernel: computed
within the product of rows and weights, they would be other bits.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ffn_faas import native
from ffn_faas.errors import NativeMissing

if TYPE_CHECKING:
    import torch

_library: ctypes.CDLL | None = None
_fragments: list[torch.library.Library] = []
"""An op lives as long as the object that registered it."""
_bound: Any = None


def load() -> None:
    """Make the ops exist. Imports torch. Idempotent. NativeMissing, with the remedy, when they were not built."""
    global _library  # noqa: PLW0603 - a library is loaded once per process
    if _library is not None:
        return
    path = native.attention_ops_library()
    import torch  # first: the library finds libtorch among what is loaded already

    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeMissing(
            f"the Attention ops do not load into torch {torch.__version__}: {error}", remedy=native.OPS_REMEDY
        ) from error
    library.ffn_faas_bind.argtypes = [ctypes.c_void_p]
    library.ffn_faas_bind.restype = ctypes.c_int
    library.ffn_faas_set_stage.argtypes = [ctypes.c_int64]
    library.ffn_faas_set_stage.restype = None
    register_fakes()
    _library = library


def bind(client: Any) -> None:
    """From now on the ops use ``client`` (an ``_native.AttentionClient``), which is kept alive; None unbinds."""
    global _bound  # noqa: PLW0603 - torch ops are global, and so is what they call
    load()
    if _library is None or _library.ffn_faas_bind(client.bind() if client is not None else None) != 0:
        raise NativeMissing(
            "the Attention ops and ffn_faas._native are of different versions", remedy=native.OPS_REMEDY
        )
    _bound = client


def set_stage(stage: int) -> None:
    """The stage of dispatches that the calling thread issues from now on; 0 until said otherwise."""
    load()
    if _library is not None:
        _library.ffn_faas_set_stage(stage)


def register_fakes() -> None:
    """What torch.compile needs to know of the two ops, once they are defined; and ``unit_weights``."""
    import torch

    fragment = torch.library.Library("ffn_faas", "FRAGMENT")
    fragment.define("unit_weights(Tensor topk_weights) -> Tensor")
    fragment.impl("unit_weights", torch.ones_like, "CompositeExplicitAutograd")
    torch.library.register_fake("ffn_faas::unit_weights", torch.empty_like, lib=fragment)
    _fragments.append(fragment)

    @torch.library.register_fake("ffn_faas::dispatch")
    def _dispatch(
        x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int, part: int = 0, parts: int = 1
    ) -> torch.Tensor:
        return x.new_empty((2,), dtype=torch.int64)

    @torch.library.register_fake("ffn_faas::combine")
    def _combine(
        ticket: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        part: int = 0,
        parts: int = 1,
    ) -> torch.Tensor:
        if parts > 1:
            return x.new_empty(((x.shape[0] + parts - 1) // parts, x.shape[1]))
        return torch.empty_like(x, memory_format=torch.contiguous_format)
