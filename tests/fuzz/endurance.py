"""The long run: sessions that come and go, and items without end; memory and descriptors must stay flat.

    python -m tests.fuzz.endurance --cycles 10000 --items 1000000 --over shm        (or tcp)

Every cycle opens windows through the connector as a real session does, posts once, checks the sum and leaves.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.connectors.tcp_client import connect_windows
from tests.connectors.processes import NumpyKernel
from tests.fuzz.report import Held
from tests.native.world import oracle

GEOMETRY = WindowGeometry(stages=1, capacity=4, hidden_size=8, top_k=2, element_size=4)
EXPERTS = 3
SETTLE = 200
"""Cycles before the first measurement."""


class Runner:
    """One F rank stepped by a thread, and clients of it in this one."""

    def __init__(self, over: str) -> None:
        self.over = over
        self.connector = ShmConnector()
        self._stop = False
        self._thread = threading.Thread(target=self._step)
        self._thread.start()
        rng = np.random.default_rng(0)
        self.x = rng.integers(-8, 9, (4, 8)).astype(np.float32)
        self.ids = rng.integers(-1, EXPERTS, (4, 2)).astype(np.int32)
        self.weights = (rng.integers(0, 5, (4, 2)) / 4).astype(np.float32)
        self.expected = oracle(0, self.x, self.ids, self.weights)
        self.call = native.load().Call(
            stage=0, handle=0, rows=4, hidden_size=8, top_k=2, dtype=native.load().F32, x=self.x.ctypes.data,
            ids=self.ids.ctypes.data, ids_are_int64=False, weights=self.weights.ctypes.data,
        )  # fmt: skip

    def _step(self) -> None:
        kernel = NumpyKernel(0)
        while not self._stop:
            self.connector.step(kernel, 0.1)

    def attach(self, epoch: int):
        connector = self.connector
        open_link = connector.open_link if self.over == "shm" else connector.open_remote_link
        link, offer = open_link(GEOMETRY, epoch, [EXPERTS])
        fetch = fetch_windows if self.over == "shm" else connect_windows
        reached = dataclasses.replace(offer, broker=offer.broker.replace("tcp:", "tcp:127.0.0.1:"))
        client = native.load().AttentionClient(native_geometry(GEOMETRY), [EXPERTS])
        client.set_layers([0])
        client.set_link(0, fetch(reached, GEOMETRY, epoch, 10))
        connector.activate_link(link)
        return link, client

    def post(self, client) -> None:
        out = np.full_like(self.x, np.nan)
        client.dispatch(self.call)
        client.combine(self.call, out.ctypes.data)
        np.testing.assert_array_equal(out, self.expected)

    def cycle(self, epoch: int) -> None:
        link, client = self.attach(epoch)
        self.post(client)
        self.connector.close_link(link)

    def close(self) -> None:
        self._stop = True
        self.connector.cancel_receive()
        self._thread.join()
        self.connector.close()


def run(over: str, cycles: int, items: int) -> str:
    """How much this process grew; raises AssertionError when it did by more than noise, or an answer is wrong."""
    runner = Runner(over)
    try:
        for epoch in range(1, SETTLE):
            runner.cycle(epoch)
        before = Held.now()
        for epoch in range(SETTLE, SETTLE + cycles):
            runner.cycle(epoch % (1 << 24) or 1)
        link, client = runner.attach(7)
        for _ in range(items):
            runner.post(client)
        runner.connector.close_link(link)
        del client
        time.sleep(0.3)  # the stepping thread lets go of what was closed
        after = Held.now()
    finally:
        runner.close()
    if after.leaks(before):
        raise AssertionError(after.growth(before))
    return after.growth(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--over", choices=("shm", "tcp"), default="shm")
    args = parser.parse_args()
    started = time.monotonic()
    growth = run(args.over, args.cycles, args.items)
    seconds = time.monotonic() - started
    print(f"{args.cycles} attachments and {args.items} items over {args.over} in {seconds:.0f} s: {growth}")


if __name__ == "__main__":
    main()
