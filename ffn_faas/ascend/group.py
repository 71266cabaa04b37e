"""One communication group over all A and F ranks, and what every operator call of a rank has in common."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffn_faas.errors import ResourceError

if TYPE_CHECKING:
    import torch

    from ffn_faas.ascend.op_module import OpModule
    from ffn_faas.ascend.shape import CamShape

GROUP = "afd_async_cam"
RENDEZVOUS_S = 30 * 60
COMM_ID = 0
"""Reserved."""


@dataclass(frozen=True)
class Member:
    """This rank in the group. ``anchor`` and ``comm_args`` are placeholders that the operators ask for."""

    ops: OpModule
    shape: CamShape
    world_rank: int
    group: str
    device: Any
    dtype: Any
    anchor: torch.Tensor
    comm_args: torch.Tensor

    @classmethod
    def create(cls, ops: OpModule, shape: CamShape, world_rank: int, group: str, device: Any, dtype: str) -> Member:
        """``dtype``: bfloat16 or float16, of rows. Raises ResourceError for another."""
        import torch

        if dtype not in ("bfloat16", "float16"):
            raise ResourceError(f"rows of {dtype} cannot travel over CAM", remedy="--dtype bfloat16 or float16")
        kind = getattr(torch, dtype)
        anchor = torch.zeros(1, dtype=kind, device=device)
        comm_args = torch.zeros(1, dtype=torch.float16, device=device)
        return cls(ops, shape, world_rank, group, device, kind, anchor, comm_args)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What every operator takes in a row.

        Hidden size, top-k, F ranks, A ranks, experts of an F rank, this rank in the group, and the group's size.
        """
        shape = self.shape
        of_ranks = shape.ffn_ranks, shape.attention_ranks, shape.experts_per_rank
        return shape.hidden_size, shape.top_k, *of_ranks, self.world_rank, shape.world_size


def open_store(host: str, port: int, listener_fd: int | None = None) -> Any:
    """The store of the rendezvous; with ``listener_fd``, a listening socket that it takes over, its server as well."""
    from torch.distributed import TCPStore

    timeout = dt.timedelta(seconds=RENDEZVOUS_S)
    extra = {} if listener_fd is None else {"is_master": True, "master_listen_fd": listener_fd}
    try:
        return TCPStore(host, port, wait_for_workers=False, timeout=timeout, **extra)
    except RuntimeError as error:
        raise ResourceError(
            f"the store of the rendezvous at {host}:{port} cannot be reached: {error}",
            remedy="F rank 0 serves it on --data-port; A and every F rank must reach that",
        ) from error


class HcclGroup:
    """The group on devices. Made over the store, without a default process group; ranks meet when it is made.

    ``name`` is the communicator's, as the operators take it. Never destroyed while a receive may be pending.
    """

    def __init__(self, store: Any, shape: CamShape, world_rank: int, buffer_mib: int) -> None:
        from torch.distributed import PrefixStore
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_mib}
        # What torch-npu itself sets where torch asks it for a group.
        options.is_high_priority_stream = False
        options._timeout = dt.timedelta(seconds=RENDEZVOUS_S)  # noqa: SLF001 - the name that torch gives it
        options.global_ranks_in_group = list(range(shape.world_size))
        options.group_id = GROUP
        self._group = ProcessGroupHCCL(PrefixStore(GROUP, store), world_rank, shape.world_size, options)
        self.name: str = self._group.get_hccl_comm_name(world_rank)


def twin_group_name(nonce: str) -> str:
    """The twin has no communicator: its file is named after the start, so that no two starts share one."""
    return f"{GROUP}.{nonce}"
