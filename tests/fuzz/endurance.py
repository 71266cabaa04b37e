"""The long run: sessions that come and go, and items without end; memory and descriptors must stay flat.

    python -m tests.fuzz.endurance --cycles 10000 --items 1000000 --over shm        (or tcp)

Every cycle opens windows through the connector as a real session does, posts once, compares the answer and leaves. The
experts are the compiled kernel's, stepped in C++ as ``serve`` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time

import numpy as np
import torch

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.connectors.tcp_client import connect_windows
from tests import oracle
from tests.fuzz.report import Held

HIDDEN, INTER, EXPERTS, TOP_K, ROWS = 8, 4, 3, 2, 4
GEOMETRY = WindowGeometry(stages=1, capacity=ROWS, hidden_size=HIDDEN, top_k=TOP_K, element_size=4)
SETTLE = 200
"""Cycles before the first measurement."""


class Runner:
    """One F rank with the compiled kernel, stepped by a thread, and clients of it in this one."""

    def __init__(self, over: str) -> None:
        self.over = over
        rng = np.random.default_rng(0)
        w13 = rng.normal(size=(EXPERTS, 2 * INTER, HIDDEN)).astype(np.float32)
        w2 = rng.normal(size=(EXPERTS, HIDDEN, INTER)).astype(np.float32)
        self._experts = _packed(w13, w2)
        # What ShmConnector.step asks of a compiled kernel.
        self.native_address, self.spec = self._experts.address, None
        self.x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
        self.ids = rng.integers(-1, EXPERTS, (ROWS, TOP_K)).astype(np.int32)
        self.weights = rng.random((ROWS, TOP_K), np.float32)
        self.call = native.load().Call(
            stage=0, handle=0, rows=ROWS, hidden_size=HIDDEN, top_k=TOP_K, dtype=native.load().F32,
            x=self.x.ctypes.data, ids=self.ids.ctypes.data, ids_are_int64=False, weights=self.weights.ctypes.data,
        )  # fmt: skip
        self.connector = ShmConnector()
        self._stop = False
        self._thread = threading.Thread(target=self._step)
        self._thread.start()
        self.expected: np.ndarray | None = None
        self._first_answer(w13, w2)

    def _first_answer(self, w13: np.ndarray, w2: np.ndarray) -> None:
        """Right by the oracle; every later answer has its bits."""
        link, client = self.attach(1)
        self.expected = self.answer(client)
        self.connector.close_link(link)
        arrays = (self.x, w13, w2, self.ids, self.weights)
        reference = oracle.moe(*map(torch.from_numpy, arrays))
        np.testing.assert_allclose(self.expected, reference, rtol=1e-5, atol=1e-5)

    def _step(self) -> None:
        while not self._stop:
            self.connector.step(self, 0.1)

    def compute(self, layer, hidden, expert_ids, weights, out) -> None:
        raise AssertionError("a compiled kernel is not called from Python")

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

    def answer(self, client) -> np.ndarray:
        out = np.full_like(self.x, np.nan)
        client.dispatch(self.call)
        client.combine(self.call, out.ctypes.data)
        return out

    def post(self, client) -> None:
        out = self.answer(client)
        if out.tobytes() != self.expected.tobytes():
            raise AssertionError(f"answered {out}, at first it was {self.expected}")

    def cycle(self, epoch: int) -> None:
        link, client = self.attach(epoch)
        self.post(client)
        self.connector.close_link(link)

    def close(self) -> None:
        self._stop = True
        self.connector.cancel_receive()
        self._thread.join()
        self.connector.close()


def _packed(w13: np.ndarray, w2: np.ndarray):
    module = native.load()
    kernel = module.ExpertsCpu(
        layers=1, experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTER, dtype=module.F32, threads=1
    )
    for expert in range(EXPERTS):
        for matrix, values in enumerate((w13[expert, :INTER], w13[expert, INTER:], w2[expert])):
            kernel.pack(0, expert, matrix, values.ctypes.data)
    return kernel


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
