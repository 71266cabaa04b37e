"""F ranks in threads and an Attention client in the test, with experts so simple that every sum is exact in f32."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import native_geometry

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
EPOCH = 5


def expert_scale(layer: int, expert: np.ndarray) -> np.ndarray:
    """Expert e of layer l multiplies its row by a small integer."""
    return (expert % 7) + 2 * layer - 3


def to_wire(rows: np.ndarray, dtype: str) -> np.ndarray:
    """f32 to the wire type; bfloat16 as u16, by torch (the code under test is not asked)."""
    if dtype == "float32":
        return np.ascontiguousarray(rows, np.float32)
    if dtype == "float16":
        return rows.astype(np.float16)
    import torch

    return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_wire(rows: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(dtype).astype(np.float32)


def oracle(layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What one layer's experts give, f64, for rows [T, H], global ids [T, K] and weights [T, K]."""
    out = np.zeros(x.shape, np.float64)
    for row in range(len(x)):
        for k in range(ids.shape[1]):
            if ids[row, k] >= 0:
                out[row] += float(weights[row, k]) * expert_scale(layer, ids[row, k]) * x[row].astype(np.float64)
    return out


@dataclass
class Seen:
    """What an F rank was sent, in order."""

    layers: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)


def answer(item, first_expert: int, dtype: str) -> np.ndarray:
    """Compute an item the way an F rank does; writes ``partial``, returns the rows it was sent."""
    hidden = from_wire(np.asarray(item.hidden), dtype)
    ids, weights = np.asarray(item.expert_ids), np.asarray(item.weights)
    used = ids >= 0
    scale = np.where(used, weights * expert_scale(item.layer, ids + first_expert), 0).sum(axis=1, keepdims=True)
    np.asarray(item.partial)[:] = hidden * scale
    return hidden


class FRank:
    """A receiver with a thread that answers; ``links`` can be added at any time."""

    def __init__(
        self, first_expert: int, num_experts: int, num_layers: int, dtype: str, spin_us: int = 50, **options: int
    ) -> None:
        self.receiver = native.load().ItemReceiver(spin_us=spin_us, **options)
        self.counts = [num_experts] * num_layers
        self.mirrors: list = []
        self.seen = Seen()
        self.failure: BaseException | None = None
        self._first = first_expert
        self._dtype = dtype
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            # The second condition: a test that failed before it closed this must not keep the process from ending.
            while not self._stop and threading.main_thread().is_alive():
                item = self.receiver.receive(100_000)
                if item is not None:
                    self.seen.layers.append(item.layer)
                    self.seen.rows.append(answer(item, self._first, self._dtype))
                    item.complete()
        except BaseException as error:  # noqa: BLE001 - raised again by close
            self.failure = error

    def leave(self) -> None:
        """End the connections of remote links, as the death of an F rank does."""
        for mirror in self.mirrors:
            mirror.close()

    def close(self) -> None:
        self._stop = True
        self.receiver.cancel()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


CONNECTORS = ("shm", "tcp")
over = CONNECTORS[0]
"""What joins the worlds made from now on; tests.native.conftest runs whole modules over each."""


def join(rank: FRank, shape, epoch: int, key: int = 0, poison: bool = False):
    """Windows of a new link between ``rank`` and a client; returns those for the client."""
    module = native.load()
    arena = module.Arena.create(shape, epoch)
    if poison:
        arena.poison()
    rank.receiver.add_link(key, arena, rank.counts)
    if over == "shm":
        return module.Arena.map(os.dup(arena.fd), os.dup(rank.receiver.doorbell), shape, epoch)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rank.mirrors.append(module.ServiceMirror(far.detach(), arena, rank.receiver, key))
    return module.connect_windows(near.detach(), shape, epoch)


class World:
    """M F ranks and one Attention client; ``expert_counts`` per F rank."""

    def __init__(
        self,
        expert_counts: list[int],
        *,
        top_k: int = 2,
        hidden_size: int = 24,
        capacity: int = 8,
        dtype: str = "float32",
        stages: int = 1,
        wire_layers: tuple[int, ...] = (0, 1),
        spin_us: int = 50,
        **options: int,
    ) -> None:
        module = native.load()
        self.dtype, self.top_k, self.hidden_size, self.capacity = dtype, top_k, hidden_size, capacity
        self.wire_layers = wire_layers
        self.expert_counts = expert_counts
        self.geometry = WindowGeometry(stages, capacity, hidden_size, top_k, ELEMENT_SIZES[dtype])
        shape = native_geometry(self.geometry)
        self.client = module.AttentionClient(shape, expert_counts, spin_us=spin_us)
        self.client.set_layers(list(wire_layers))
        self.ranks: list[FRank] = []
        self.arenas = []
        first = 0
        for index, count in enumerate(expert_counts):
            rank = FRank(first, count, max(wire_layers) + 1, dtype, spin_us, **options)
            mapped = join(rank, shape, EPOCH)
            self.client.set_link(index, mapped)
            self.ranks.append(rank)
            self.arenas.append(mapped)
            first += count

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
            rank.leave()

    def call(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, handle: int = 0, stage: int = 0):
        """A native call on these arrays (x already in the wire type); the arrays must outlive it."""
        return native.load().Call(
            stage=stage,
            handle=handle,
            rows=len(x),
            hidden_size=self.hidden_size,
            top_k=self.top_k,
            dtype=DTYPES[self.dtype],
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=ids.dtype == np.int64,
            weights=weights.ctypes.data,
        )

    def poison(self) -> None:
        for arena in self.arenas:
            arena.poison()

    def step(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, handle: int = 0, stage: int = 0) -> np.ndarray:
        """Dispatch and combine f32 rows over poisoned windows; the answer as f32."""
        self.poison()
        wire = to_wire(x, self.dtype)
        ids, weights = np.ascontiguousarray(ids), np.ascontiguousarray(weights, np.float32)
        out = np.full(wire.shape, 0x7E7E if wire.dtype == np.uint16 else np.nan, wire.dtype)
        call = self.call(wire, ids, weights, handle, stage)
        self.client.dispatch(call)
        self.client.combine(call, out.ctypes.data)
        return from_wire(out, self.dtype)


def batch(rng: np.random.Generator, rows: int, world: World, *, padding: float = 0.1, id_type: type = np.int32):
    """Integer rows and quarter weights: every product and sum is exact. Ids with -1 padding and duplicates."""
    experts = sum(world.expert_counts)
    x = rng.integers(-8, 9, (rows, world.hidden_size)).astype(np.float32)
    ids = rng.integers(0, experts, (rows, world.top_k)).astype(id_type)
    ids[rng.random(ids.shape) < padding] = -1
    weights = (rng.integers(0, 5, ids.shape) / 4).astype(np.float32)
    return x, ids, weights
