"""An A rank as a process of its own: maps the windows it is offered and does what its one JSON argument says.

Modes: "rounds" (N checked round trips with random pauses), "die" (dispatch, say so, be killed), "forever" (posts
without pause until killed). Prints one line when it is done or where the test is to act.
"""

import json
import os
import signal
import sys
import time

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.base import TCP, WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.connectors.tcp_client import connect_windows
from tests.native.world import oracle


def main(arguments: dict) -> None:
    module = native.load()
    geometry = WindowGeometry(*arguments["geometry"])
    client = module.AttentionClient(
        native_geometry(geometry), arguments["counts"], spin_us=arguments.get("spin_us", 50)
    )
    client.set_layers([0, 1])
    for rank, offer in enumerate(arguments["offers"]):
        made = WindowOffer(*offer)
        fetch = connect_windows if made.broker.startswith(TCP) else fetch_windows
        client.set_link(rank, fetch(made, geometry, arguments["epoch"], 10))
    print("mapped", flush=True)
    sys.stdin.readline()
    rng = np.random.default_rng(arguments["seed"])
    rounds = 0
    while arguments["mode"] != "rounds" or rounds < arguments["rounds"]:
        rows = int(rng.integers(0, 2 * geometry.capacity))
        x = rng.integers(-8, 9, (rows, geometry.hidden_size)).astype(np.float32)
        ids = rng.integers(-1, sum(arguments["counts"]), (rows, geometry.top_k)).astype(np.int32)
        weights = (rng.integers(0, 5, ids.shape) / 4).astype(np.float32)
        out = np.full_like(x, np.nan)
        call = module.Call(
            stage=0,
            handle=rounds % 2,
            rows=rows,
            hidden_size=geometry.hidden_size,
            top_k=geometry.top_k,
            dtype=module.F32,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=False,
            weights=weights.ctypes.data,
        )
        client.dispatch(call)
        if arguments["mode"] == "die":
            print("dispatched", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        client.combine(call, out.ctypes.data)
        np.testing.assert_array_equal(out, oracle(rounds % 2, x, ids, weights))
        rounds += 1
        if arguments["mode"] == "rounds" and rng.random() < 0.5:
            time.sleep(float(rng.choice([0, 2e-5, 1e-4, 4e-4])))
    print(f"done {rounds}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
