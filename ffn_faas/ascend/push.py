"""Push: Attention sends and receives by itself, F receives, computes and sends. The transaction state of each side."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffn_faas.ascend.group import COMM_ID
from ffn_faas.errors import SessionLost

if TYPE_CHECKING:
    import torch

    from ffn_faas.ascend.group import Member


@dataclass(frozen=True)
class Routing:
    """Of a dispatch in flight; the combine needs the same again. Kept alive until that has succeeded."""

    layer: int
    expert_ids: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor


class PushAttention:
    """One A rank. A window is rewritten by the next dispatch, so one exchange at a time is in flight over all stages.

    The stages alternate: dispatch of one, attention of the other, combine of the first, dispatch of the other. A
    failed dispatch leaves no routing behind; a failed combine keeps its own, for whoever looks at the failure.
    """

    def __init__(self, member: Member, stages: int = 1) -> None:
        self._member = member
        self._in_flight: tuple[deque[Routing], ...] = tuple(deque() for _ in range(stages))

    def in_flight(self, stage: int) -> int:
        """Dispatches of ``stage`` whose combine has not succeeded."""
        return len(self._in_flight[stage])

    def dispatch(
        self, stage: int, layer: int, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """``x`` [B, H] in the member's dtype, ``expert_ids`` i32 [B, K], ``weights`` f32 [B, K]; contiguous; 1 <= B.

        ``layer``: the model's number of it. Raises SessionLost when another exchange is in flight.
        """
        for other, routings in enumerate(self._in_flight):
            if routings:
                raise SessionLost(
                    f"stage {stage} dispatches layer {layer} while layer {routings[0].layer} of stage {other} is in "
                    "flight: its window would be overwritten"
                )
        member, shape = self._member, self._member.shape
        member.ops.dispatch_send(
            x,
            expert_ids,
            member.comm_args,
            COMM_ID,
            shape.max_num_batched_tokens,
            x.shape[0],
            *member.sizes,
            layer,
            shape.tensor_parallel,
            int(shape.dynamic_quant),
            member.group,
        )
        self._in_flight[stage].append(Routing(layer, expert_ids, weights, x))

    def combine(self, stage: int) -> torch.Tensor:
        """[B, H]: the weighted sums of the oldest dispatch of ``stage``. Blocks, or its device does, for all of F."""
        if not self._in_flight[stage]:
            raise SessionLost(f"stage {stage} combines without a dispatch in flight")
        routing = self._in_flight[stage][0]
        member = self._member
        combined: torch.Tensor = member.ops.combine_recv(
            member.anchor,
            routing.expert_ids,
            routing.weights,
            member.comm_args,
            COMM_ID,
            routing.expert_ids.shape[0],
            *member.sizes,
            member.group,
        )
        self._in_flight[stage].popleft()
        return combined


@dataclass(frozen=True)
class Received:
    """One chunk. ``x`` [N, H], int8 with ``scales`` f32 [N], or float with scales [1]; N is the capacity, and rows
    beyond the sum of ``counts`` i64 [R] are garbage. ``batch_info`` goes back unmodified; its third entry is the layer.
    """

    x: torch.Tensor
    scales: torch.Tensor
    batch_info: torch.Tensor
    counts: torch.Tensor


class PushFfn:
    """One F rank: receive, send, receive, send ... in one stream."""

    def __init__(self, member: Member) -> None:
        self.member = self._member = member
        self._received: Received | None = None

    @property
    def owes_a_send(self) -> bool:
        return self._received is not None

    def receive(self) -> Received:
        """The next chunk of any group and layer. Blocks, or its device does, without end; nothing cancels it."""
        if self._received is not None:
            raise SessionLost("a chunk was received, and nothing sent for it, before the next receive")
        member, shape = self._member, self._member.shape
        parts: list[torch.Tensor] = member.ops.dispatch_recv(
            member.anchor,
            member.comm_args,
            COMM_ID,
            shape.max_num_batched_tokens,
            *member.sizes,
            shape.tensor_parallel,
            int(shape.dynamic_quant),
            member.group,
        )
        self._received = Received(*parts)
        return self._received

    def send(self, y: torch.Tensor) -> tuple[Any, ...]:
        """``y`` [at least 1 and all valid rows, H] in the member's dtype; a chunk without rows takes a row of zeros.

        Returns what has to stay alive until the device is past this send.
        """
        received = self._received
        if received is None:
            raise SessionLost("nothing was received that this could answer")
        member, shape = self._member, self._member.shape
        sent = member.ops.combine_send(
            y,
            member.comm_args,
            received.batch_info,
            COMM_ID,
            shape.max_num_batched_tokens,
            *member.sizes,
            shape.tensor_parallel,
            member.group,
        )
        self._received = None
        return received, y, sent
