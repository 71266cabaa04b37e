"""An A rank written from ffn_faas/protocol/window.py alone; also says things that no good peer would say."""

from __future__ import annotations

import os
import struct
import time

import numpy as np

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.protocol.window import flag, window_layout


class HandWrittenPeer:
    def __init__(self, memory: memoryview, doorbell: int, geometry: WindowGeometry, epoch: int) -> None:
        self.memory, self.doorbell, self.geometry, self.epoch = memory, doorbell, geometry, epoch
        self.layout = window_layout(geometry)
        self.sequence = 0

    def post(self, layer: int, rows: int, ids: list[int], weights: list[float], hidden: bytes) -> None:
        layout, memory = self.layout, self.memory
        struct.pack_into("<ii", memory, layout.stage(0) + layout.dispatch_layer, layer, rows)
        struct.pack_into(f"<{len(ids)}i", memory, layout.stage(0) + layout.dispatch_ids, *ids)
        struct.pack_into(f"<{len(weights)}f", memory, layout.stage(0) + layout.dispatch_weights, *weights)
        begin = layout.stage(0) + layout.dispatch_hidden
        memory[begin : begin + len(hidden)] = hidden
        self.sequence += 1
        self.release(flag(self.epoch, self.sequence))

    def release(self, number: int) -> None:
        struct.pack_into("<Q", self.memory, self.layout.stage(0) + self.layout.dispatch_flag, number)
        os.write(self.doorbell, struct.pack("<Q", 1))

    def answered(self) -> bool:
        offset = self.layout.stage(0) + self.layout.combine_flag
        return struct.unpack_from("<Q", self.memory, offset) == (flag(self.epoch, self.sequence),)

    def answer(self, rows: int, timeout_s: float = 10) -> np.ndarray:
        deadline = time.monotonic() + timeout_s
        while not self.answered():
            assert time.monotonic() < deadline, "F did not answer"
            time.sleep(0.0005)
        count = rows * self.geometry.hidden_size
        offset = self.layout.stage(0) + self.layout.combine_partial
        return np.frombuffer(self.memory, np.float32, count, offset).reshape(rows, self.geometry.hidden_size).copy()
