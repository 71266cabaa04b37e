"""Round trip of a post between two processes that computes nothing (ZeroKernel): medians in microseconds.

    python -m tests.bench.bench_windows [--hidden-size 2048] [--rounds 5000]

"spinning": both sides find the flag while they spin. "sleeping": no spin, so every wait goes through the kernel: A by
its futex, F by its doorbell. Bound by the copies for many rows, by two processes handing over a cache line for one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Event

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows

TOP_K = 8
EXPERTS = 128


def serve(offers: multiprocessing.Queue, geometry: WindowGeometry, spin_us: int, stop: Event) -> None:
    """F: a process that steps a native kernel."""

    class Zeros:
        spec = None
        kernel = native.load().ZeroKernel()
        native_address = kernel.address

    connector = ShmConnector(spin_us=spin_us)
    link, offer = connector.open_link(geometry, 1, [EXPERTS])
    offers.put(offer)
    offers.join()
    connector.activate_link(link)
    while not stop.is_set():
        for _ in range(1000):
            if not connector.step(Zeros(), 0.05):
                break
    connector.close()


def measure(offer: WindowOffer, mapped, geometry: WindowGeometry, rows: list[int], spin_us: int, rounds: int):
    module = native.load()
    client = module.AttentionClient(native_geometry(geometry), [EXPERTS], spin_us=spin_us)
    client.set_layers([0])
    client.set_link(0, fetch_windows(offer, geometry, 1, 10))
    mapped()
    rng = np.random.default_rng(0)
    for count in rows:
        x = np.zeros((count, geometry.hidden_size), np.uint16)
        ids = rng.integers(0, EXPERTS, (count, TOP_K)).astype(np.int32)
        weights = np.ones((count, TOP_K), np.float32)
        out = np.empty_like(x)
        call = module.Call(
            stage=0,
            handle=0,
            rows=count,
            hidden_size=geometry.hidden_size,
            top_k=TOP_K,
            dtype=module.BF16,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=False,
            weights=weights.ctypes.data,
        )
        times = []
        for _ in range(max(200, rounds // (1 + count // 16))):
            started = time.perf_counter_ns()
            client.dispatch(call)
            client.combine(call, out.ctypes.data)
            times.append(time.perf_counter_ns() - started)
        yield count, statistics.median(times) / 1e3, sorted(times)[len(times) * 99 // 100] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5000)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = [1, 8, 64, 512]
    geometry = WindowGeometry(1, max(rows), arguments.hidden_size, TOP_K, 2)
    print(f"{os.cpu_count()} CPUs, hidden {arguments.hidden_size} bf16, top-{TOP_K}")
    print(f"{'wait':<10}{'rows':>6}{'median us':>12}{'p99 us':>10}")
    for name, spin_us in (("spinning", 100_000), ("sleeping", 0)):
        offers, stop = context.JoinableQueue(), context.Event()
        process = context.Process(target=serve, args=(offers, geometry, spin_us, stop))
        process.start()
        offer = offers.get()
        for count, median, p99 in measure(offer, offers.task_done, geometry, rows, spin_us, arguments.rounds):
            print(f"{name:<10}{count:>6}{median:>12.1f}{p99:>10.1f}", flush=True)
        stop.set()
        process.join()


if __name__ == "__main__":
    main()
