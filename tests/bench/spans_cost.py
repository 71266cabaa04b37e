"""What keeping times of single steps costs: one thread dispatches, steps and combines one row with an empty kernel.

    python -m tests.bench.spans_cost           # nobody has asked for times
    python -m tests.bench.spans_cost on        # both sides keep them

Prints the least and the median of 20 medians over 4000 rounds, in ns. Run both in turns: a machine has fast and slow
minutes, so that only the least of many runs compare.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import native_geometry

HIDDEN, TOP_K, EXPERTS = 2048, 8, 128
STRETCHES, ROUNDS = 20, 4000


def main(on: bool) -> None:
    module = native.load()
    geometry = native_geometry(WindowGeometry(1, 16, HIDDEN, TOP_K, 2))
    receiver, kernel, arena = module.ItemReceiver(), module.ZeroKernel(), module.Arena.create(geometry, 1)
    receiver.add_link(0, arena, [EXPERTS])
    client = module.AttentionClient(geometry, [EXPERTS])
    client.set_layers([0])
    client.set_link(0, module.Arena.map(os.dup(arena.fd), os.dup(receiver.doorbell), geometry, 1))
    x, out = np.zeros((1, HIDDEN), np.uint16), np.zeros((1, HIDDEN), np.uint16)
    ids, weights = np.arange(TOP_K, dtype=np.int32)[None], np.ones((1, TOP_K), np.float32)
    call = module.Call(
        stage=0, handle=0, rows=1, hidden_size=HIDDEN, top_k=TOP_K, dtype=module.BF16, x=x.ctypes.data,
        ids=ids.ctypes.data, ids_are_int64=False, weights=weights.ctypes.data,
    )  # fmt: skip
    address, target = kernel.address, out.ctypes.data
    medians = []
    for _ in range(STRETCHES):
        if on:
            receiver.record(ROUNDS)
            client.record(ROUNDS)
        rounds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter_ns()
            client.dispatch(call)
            receiver.step(address, 0)
            client.combine(call, target)
            rounds.append(time.perf_counter_ns() - begin)
        medians.append(statistics.median(rounds))
    print(round(min(medians)), round(statistics.median(medians)))


if __name__ == "__main__":
    main(on="on" in sys.argv[1:])
