"""Async CAM, A's side: the client that an AttentionSession drives, and the exchange of one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ffn_faas.ascend import group
from ffn_faas.ascend.coordinator import AttentionStartup, warm_up_ids
from ffn_faas.ascend.push import PushAttention
from ffn_faas.ascend.settings import TWIN
from ffn_faas.ascend.shape import DEFAULT_HCCL_BUFFER_MIB
from ffn_faas.ascend.step import farewell_layer
from ffn_faas.errors import SessionLost
from ffn_faas.last_exit import end_process
from ffn_faas.telemetry.spans import PostSpan, Recorder

if TYPE_CHECKING:
    import torch

    from ffn_faas.ascend.device import Device
    from ffn_faas.ascend.op_module import OpModule
    from ffn_faas.ascend.settings import CamSettings
    from ffn_faas.ascend.shape import CamShape
    from ffn_faas.connectors.base import WindowGeometry, WindowOffer
    from ffn_faas.protocol.messages import Times

FILLER = 0.25
"""Of rows that carry no token: one of zeros has no scale to be quantized with."""
GRACE_S = 1.0


class CamClient:
    """meet -> (dispatch -> combine) ... -> farewell. One thread makes all of these calls but ``farewell`` and ``fail``.

    ``lethal``: a session that is lost while an exchange is in flight ends the process, since nothing cancels that.
    """

    def __init__(
        self,
        ops: OpModule,
        device: Device,
        settings: CamSettings,
        shape: CamShape,
        numbers: Sequence[int],
        rank: int,
        dtype: str,
        *,
        stages: int = 1,
        lethal: bool = False,
    ) -> None:
        """``numbers``: the model's number of each of F's layers, in F's order."""
        self.reason = ""
        self.layers: list[int] = []
        """The model's number of each layer handle."""
        self.shape = shape
        self._ops, self.device, self._settings = ops, device, settings
        self._numbers = list(numbers)
        self._rank, self._dtype, self._stages, self._lethal = rank, dtype, stages, lethal
        self._push: PushAttention | None = None
        self._hccl: group.HcclGroup | None = None
        self._startup: AttentionStartup | None = None
        self._exchange = threading.Lock()
        """Held from a dispatch to its combine."""
        self._spans: Recorder[PostSpan] = Recorder()
        self._posted: PostSpan | None = None
        """The post in flight, as far as its times are known, where they are asked for."""
        self._said_farewell = False
        self._store: Any = None

    def __str__(self) -> str:
        return f"ops={self._ops.name}, start {self._startup.nonce[:8] if self._startup is not None else 'none'}"

    def fetch(self, offer: WindowOffer, geometry: WindowGeometry, epoch: int, timeout: float) -> None:
        """There is nothing to map."""

    def set_layers(self, indices: list[int]) -> None:
        self.layers = [self._numbers[index] for index in indices]

    def set_link(self, ffn_rank: int, arena: Any) -> None:
        """There are no windows to take over."""

    def meet(self, host: str, port: int, interrupt: Callable[[], None]) -> None:
        """Start together with F over the store at ``host``: returns when all of F is ready. Blocks; FfnError."""
        store = self._store = group.open_store(host, port)
        settings = self._settings
        if settings.ops != TWIN:
            buffer_mib = settings.hccl_buffer_mib or DEFAULT_HCCL_BUFFER_MIB["attention"]
            self._hccl = group.HcclGroup(store, self.shape, self._rank, buffer_mib)
        self._startup = startup = AttentionStartup(store, self.shape, self._rank, interrupt)
        startup.open()
        name = self._hccl.name if self._hccl is not None else group.twin_group_name(startup.nonce)
        device = self.device.torch_device
        member = group.Member.create(self._ops, self.shape, self._rank, name, device, self._dtype)
        self._push = PushAttention(member, self._stages)
        startup.run(self._warm_up)

    def _warm_up(self, layer: int) -> None:
        with self._exchange:
            self._one_row(layer)

    def dispatch(
        self, layer: int, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, stage: int = 0
    ) -> None:
        """``layer``: a handle. ``x`` [B, H], 0 <= B <= rows_per_rank; ids i32 [B, K], -1 = no expert; weights f32."""
        self._take_exchange(stage, layer)
        dispatching, rows = time.monotonic_ns(), x.shape[0]
        try:
            self._pushing().dispatch(stage, self.layers[layer], *self._filled(x, expert_ids, weights))
        except BaseException:
            self._exchange.release()
            raise
        self._posted = None
        if self._spans.active:
            place, now = self._numbers.index(self.layers[layer]), time.monotonic_ns()
            self._posted = PostSpan(dispatching, now, now, now, now, stage, place, rows)

    def combine(self, stage: int = 0) -> torch.Tensor:
        """[max(B, 1), H]: the oldest dispatch's sums. A failure keeps the exchange: nothing may follow it."""
        waiting, posted = time.monotonic_ns(), self._posted
        combined = self._pushing().combine(stage)
        if posted is not None:
            # The operator waits and sums in one.
            now = time.monotonic_ns()
            self._spans.add(posted._replace(waiting=waiting, answered=now, summed=now))
        self._exchange.release()
        return combined

    def record(self, limit: int) -> None:
        """Keep times of the next ``limit`` posts; only over the twin, since a device's host knows when it enqueued."""
        if self._settings.ops == TWIN:
            self._spans.start(limit)

    def take_spans(self) -> list[Times]:
        """What was kept."""
        return [*self._spans.take()]

    def farewell(self, timeout_s: float = 5.0) -> None:
        """The last exchange, once every F rank has said that it stops: lets the receive that is pending there end.

        Given up when an exchange of ours stays in flight; a farewell without an answer ends the process (``lethal``).
        Any thread; idempotent.
        """
        if self._push is None or not self._exchange.acquire(timeout=timeout_s):
            return
        unanswered = threading.Timer(timeout_s, self._end, ("F does not answer the farewell",))
        unanswered.daemon = True
        try:
            if not self._said_farewell:
                self._said_farewell = True
                if self._lethal:
                    unanswered.start()
                self.device.bind()
                self._one_row(farewell_layer(self._numbers))
        finally:
            unanswered.cancel()
            self._exchange.release()

    def fail(self, reason: str) -> None:
        """Later exchanges raise ``reason``; one in flight cannot be ended, so the process is (``lethal``)."""
        self.reason = self.reason or reason
        if self._lethal and self._push is not None:
            threading.Thread(target=self._end_if_stuck, name="ffn_faas-lost", daemon=True).start()

    def _end_if_stuck(self) -> None:
        if self._exchange.acquire(timeout=GRACE_S):
            self._exchange.release()
            return
        if not self._said_farewell:
            self._end(self.reason)

    def _end(self, why: str) -> None:
        end_process(SessionLost.exit_code, f"ffn_faas: {why}; an exchange in flight cannot be cancelled")

    def _take_exchange(self, stage: int, layer: int) -> None:
        if self.reason:
            raise SessionLost(self.reason)
        if not self._exchange.acquire(blocking=False):
            raise SessionLost(f"stage {stage} dispatches layer {layer} while another exchange is in flight")

    def _pushing(self) -> PushAttention:
        if self._push is None:
            raise SessionLost("this Attention has not paired with F")
        return self._push

    def _one_row(self, layer: int) -> None:
        """A dispatch and combine of one row that reaches every F rank."""
        import torch

        shape, device = self.shape, self.device.torch_device
        ids = torch.tensor([warm_up_ids(self._rank % shape.tensor_parallel, shape)], dtype=torch.int32, device=device)
        row = torch.full((1, shape.hidden_size), FILLER, dtype=getattr(torch, self._dtype), device=device)
        weights = torch.full((1, shape.top_k), 1 / shape.top_k, device=device)
        push = self._pushing()
        push.dispatch(0, layer, row, ids, weights)
        push.combine(0)
        self.device.synchronize()

    def _filled(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that the operators can take: at least one; none of zeros; an expert for every id, with weight 0.

        The experts have no biases of their own, so that a row of zeros stays one.
        """
        import torch

        shape = self.shape
        if x.shape[0] == 0:
            x = x.new_full((1, shape.hidden_size), FILLER)
            expert_ids = expert_ids.new_full((1, shape.top_k), -1)
            weights = weights.new_zeros((1, shape.top_k))
        spread = torch.arange(x.shape[0] * shape.top_k, device=x.device, dtype=torch.int32) % shape.num_experts
        none = expert_ids < 0
        empty = (x == 0).all(-1, keepdim=True) | none.all(-1, keepdim=True)
        ids = torch.where(none, spread.view(-1, shape.top_k), expert_ids)
        return torch.where(empty, FILLER, x), ids.contiguous(), weights.masked_fill(none | empty, 0.0).contiguous()
