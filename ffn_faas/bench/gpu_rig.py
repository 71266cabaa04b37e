"""One A rank and one F rank in this process, each with its GPU (or both on one), over the kernels that serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.m2n_attention import M2nAttention
from ffn_faas.connectors.m2n_library import Library
from ffn_faas.connectors.m2n_service import M2nService, ServiceShape
from ffn_faas.connectors.m2n_window import addresses, combine_layout, dispatch_layout
from ffn_faas.experts.gpu_layout import down_rows, gate_up_rows
from ffn_faas.protocol.window import flag

if TYPE_CHECKING:
    import torch

EPOCH = 7
ROOM = 32
"""Multiprocessors for what Attention does beside F: a block of the experts fills one, and waits for its whole grid."""


@dataclass(frozen=True)
class LayerShape:
    """Routed experts of one layer; ``layers`` of them are held, so that caches do not help."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    layers: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inter * 2


class Weights:
    """Random experts on F's GPU: as published (for rivals and oracles), and in the resident row order."""

    def __init__(self, library: Library, shape: LayerShape, device: int, seed: int = 1) -> None:
        import torch

        where = torch.device("cuda", device)
        generator = torch.Generator(device=where).manual_seed(seed)
        count = shape.layers * shape.experts
        self.w13 = torch.empty(count, 2 * shape.inter, shape.hidden, dtype=torch.bfloat16, device=where)
        self.w2 = torch.empty(count, shape.hidden, shape.inter, dtype=torch.bfloat16, device=where)
        for tensor in (self.w13, self.w2):
            for expert in tensor:
                expert.normal_(0.0, 0.02, generator=generator)
        library.call("use_device", device)
        self.resident = [
            _in_order(library, self.w13, gate_up_rows(shape.inter)),
            _in_order(library, self.w2, down_rows(shape.hidden)),
        ]


def _in_order(library: Library, source: torch.Tensor, order: list[int]) -> torch.Tensor:
    import torch

    rows = torch.tensor(order, dtype=torch.int32, device=source.device)
    target = torch.empty_like(source)
    torch.cuda.synchronize(source.device)
    count, height, width = source.shape
    arguments = target.data_ptr(), source.data_ptr(), rows.data_ptr(), count, height, 2 * width
    library.call("permute_rows", *arguments)
    torch.cuda.synchronize(source.device)
    return target


@dataclass
class Batch:
    """What A dispatches: x bf16 [T, H], global ids i32 [T, K], weights f32 [T, K]; and where the result goes."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


class Rig:
    """Windows between the two devices, F's service and A's half, for one capacity. Keeps the weights alive.

    ``beside``: on one GPU, both halves' kernels at the same time (``serving``) instead of in turns in one stream.
    """

    def __init__(
        self, library: Library, shape: LayerShape, weights: Weights, rows: int, f: int, a: int, *, beside: bool = False
    ) -> None:
        self.library, self.shape, self.f, self.a = library, shape, f, a
        self.beside = beside
        self._weights = weights
        if f != a:
            library.call("enable_peer", f, a)
            library.call("enable_peer", a, f)
        geometry = self.geometry = WindowGeometry(1, max(rows, 1), shape.hidden, shape.top_k, 2)
        library.call("use_device", f)
        self._dispatch = library.allocate(dispatch_layout(geometry).nbytes)
        served = ServiceShape(
            hidden_size=shape.hidden,
            intermediate_size=shape.inter,
            top_k=shape.top_k,
            num_experts=shape.experts,
            layer_base=[layer * shape.experts for layer in range(shape.layers)],
            weight_rows=shape.layers * shape.experts,
            item_rows=geometry.capacity,
            multiprocessors=library.devices()[f].multiprocessors - ROOM if beside else 0,
        )
        self.service = M2nService(library, served, *(tensor.data_ptr() for tensor in weights.resident))
        library.call("use_device", a)
        self._combine = library.allocate(combine_layout(geometry).nbytes)
        self.attention = M2nAttention(library, geometry, [shape.experts], beside=beside)
        where = addresses(geometry, self._dispatch, self._combine, 0)
        self.attention.set_link(0, 0, where, EPOCH)
        self.attention.begin()
        library.call("use_device", f)
        self.service.set_lane(0, where, geometry.capacity, flag(EPOCH, 1))

    def batch(self, rows: int, seed: int) -> Batch:
        """Random rows, routed by the softmax of random logits, on A's device."""
        import torch

        where = torch.device("cuda", self.a)
        generator = torch.Generator(device=where).manual_seed(seed)
        x = torch.randn(rows, self.shape.hidden, device=where, generator=generator).bfloat16()
        logits = torch.randn(rows, self.shape.experts, device=where, generator=generator)
        weights, ids = torch.softmax(logits, -1).topk(self.shape.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return Batch(x, ids.int().contiguous(), weights.float().contiguous(), torch.empty_like(x))

    def dispatch(self, layer: int, batch: Batch, stream: int) -> None:
        ids, weights = batch.ids.data_ptr(), batch.weights.data_ptr()
        self.attention.dispatch(0, layer, batch.x.data_ptr(), ids, weights, batch.x.shape[0], stream)

    def receive(self, batch: Batch, stream: int) -> None:
        self.attention.receive(0, batch.out.data_ptr(), batch.x.shape[0], stream)

    @contextmanager
    def serving(self, *, captured: bool = True) -> Iterator[None]:
        """F steps in a thread of its own, as the daemon does."""
        stop = threading.Event()
        failures: list[Exception] = []

        def steps() -> None:
            try:
                self.library.call("use_device", self.f)
                while not stop.is_set():
                    self.service.step(captured=captured)
                self.service.idle()
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits
                failures.append(error)

        thread = threading.Thread(target=steps, name="F")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self.service.stop()
            thread.join()
            self.service.stop(stopped=False)
        if failures:
            raise failures[0]

    def close(self) -> None:
        self.attention.close()
        self.service.close()
        self.library.call("free", self._dispatch)
        self.library.call("free", self._combine)


def replay_times(
    record: Callable[[], None], stream: torch.cuda.Stream, per_replay: int, replays: int, *, eager: bool = False
) -> list[float]:
    """Microseconds of one of the ``per_replay`` things that ``record`` enqueues, for each graph replay.

    ``eager``: no graph, ``record`` is called each time.
    """
    import torch

    with torch.cuda.stream(stream):
        record()
        stream.synchronize()
        replay = record
        if not eager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                record()
            replay = graph.replay
        samples = []
        for turn in range(replays + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            if turn >= 3:
                samples.append(begin.elapsed_time(end) * 1e3 / per_replay)
    return samples
