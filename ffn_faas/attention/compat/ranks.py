"""Where this worker stands among the ranks of its vLLM, and which rows it sends."""

from __future__ import annotations

import uuid
from functools import cache
from typing import TYPE_CHECKING, Any

from ffn_faas.attention.loader import Place
from ffn_faas.attention.remote_experts import Rows
from ffn_faas.errors import LaunchDisagreement

if TYPE_CHECKING:
    import torch

_libraries: list[torch.library.Library] = []
"""An op lives as long as the object that registered it."""


def place(vllm_config: Any) -> Place:
    """This worker's A rank in vLLM's order (data, pipeline, tensor parallel, the last one fastest).

    All ranks of the deployment must call it: rank 0 names the instance, anew at every start, and tells the others.
    """
    ranks = vllm_config.parallel_config.world_size_across_dp
    if ranks == 1:
        return Place()
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size != ranks:
        raise LaunchDisagreement(
            f"vLLM was told to run {ranks} ranks (tensor x pipeline x data parallel), its world has {world.world_size}",
            remedy="start them as one world, for example with --data-parallel-size instead of separate launches",
        )
    name = world.broadcast_object(uuid.uuid4().hex, src=0)
    return Place(name, world.rank_in_group, ranks, vllm_config.parallel_config.tensor_parallel_size)


def rows_of_rank(moe_config: Any) -> Rows:
    """What this rank sends of the batches that the layer with ``moe_config`` sees."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    register_ops()
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # Only data parallel ranks run batches without tokens, to keep in step with those that have some.
    dummy_steps = moe_config.dp_size > 1
    return Rows(rank, size, is_slice=bool(moe_config.is_sequence_parallel), may_be_padding=dummy_steps)


@cache
def register_ops() -> None:
    """``ffn_faas::gather_rows`` and ``ffn_faas::mask_padding``: opaque, they read what no graph may hold. Idempotent.

    gather_rows(rows, x): the rows of all tensor parallel ranks, in rank order, cut to the number of rows of ``x``.
    mask_padding(ids, part, parts): ``ids`` with -1 in rows that vLLM pads the batch with; ``ids`` belong to part
    ``part`` of the batch. Both return new memory.
    """
    import torch

    library = torch.library.Library("ffn_faas", "FRAGMENT")
    library.define("gather_rows(Tensor rows, Tensor x) -> Tensor")
    library.define("mask_padding(Tensor ids, int part, int parts) -> Tensor")
    for key in ("CPU", "CUDA", "PrivateUse1"):
        library.impl("gather_rows", gather_rows, key)
        library.impl("mask_padding", mask_padding, key)
    for name in ("gather_rows", "mask_padding"):
        torch.library.register_fake(f"ffn_faas::{name}", _FAKES[name], lib=library)
    _libraries.append(library)


def gather_rows(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``rows`` [ceil(T / TP), H] of each rank, ``x`` [T, H]; returns [T, H]. Collective over the TP ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(rows, 0)[: x.shape[0]]


def mask_padding(ids: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """``ids`` [T, K] of part ``part`` of ``parts`` equal ones of the running batch (the last one filled up)."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    # vLLM 0.23 does not say which rows are padding.
    is_padding = getattr(get_forward_context(), "is_padding", None) if is_forward_context_available() else None
    if is_padding is None or -(-is_padding.shape[0] // parts) != ids.shape[0]:
        return ids.clone()
    begin = part * ids.shape[0]
    mine = ids.new_ones(ids.shape[0], dtype=is_padding.dtype)
    real = is_padding[begin : begin + ids.shape[0]]
    mine[: real.shape[0]] = real
    return ids.masked_fill(mine.unsqueeze(1), -1)


def _fake_gather(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(x.shape)


def _fake_mask(ids: torch.Tensor, part: int, parts: int) -> torch.Tensor:  # noqa: ARG001
    return ids.new_empty(ids.shape)


_FAKES = {"gather_rows": _fake_gather, "mask_padding": _fake_mask}
