"""A numpy Attention in a process of its own: a real session with a real F, one checked batch after another.

One JSON argument: model directory, port, attempt policy, seed, rounds. Every batch of rows is a function of its number
alone, so that a run with disturbances can be compared with one without: prints the digest of each answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time

import numpy as np

from ffn_faas import native
from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import data_plane
from ffn_faas.attention.loader import Model, attach_message
from ffn_faas.attention.session import AttentionSession, LossPolicy


def main(arguments: dict) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    model = Model.read(arguments["model"], None, "bfloat16", arguments.get("dummy", False))
    block = AfdBlock(role="attention", port=arguments["port"])
    attach = attach_message(block, model, "numpy", arguments.get("capacity", 64))
    policy = LossPolicy(arguments.get("reattach_timeout_s", 0.0), arguments.get("answer_timeout_s", 60.0))
    session = AttentionSession(
        f"127.0.0.1:{block.port}", attach, data_plane.shared_memory(model.spec), logging.getLogger(), policy
    )
    session.attach(30.0)
    session.declare_layers(list(model.spec.layers))
    session.wait_ready(30.0)
    print("attached", flush=True)
    try:
        for number in range(arguments["rounds"]):
            print(number, answer(session.client, model.spec, number, arguments.get("skew", 1.0)), flush=True)
            time.sleep(arguments.get("pause_s", 0.0))
    except RuntimeError as error:
        print(f"failed {error}", flush=True)
        sys.exit(1)
    if arguments.get("idle"):
        sys.stdin.readline()
        print("last", answer(session.client, model.spec, 0), flush=True)
    session.close()


def answer(client, spec, number: int, skew: float = 1.0) -> str:
    """One batch; experts by uniform random numbers to the power ``skew``: above 1, low numbers are hot."""
    rng = np.random.default_rng(number)
    rows = int(rng.integers(0, 150))
    x = (rng.normal(size=(rows, spec.hidden_size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = (rng.random((rows, spec.top_k)) ** skew * spec.num_experts).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    out = np.zeros_like(x)
    module = native.load()
    call = module.Call(
        stage=0,
        handle=number % len(spec.layers),
        rows=rows,
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        dtype=module.BF16,
        x=x.ctypes.data,
        ids=ids.ctypes.data,
        ids_are_int64=False,
        weights=weights.ctypes.data,
    )
    client.dispatch(call)
    client.combine(call, out.ctypes.data)
    return hashlib.sha256(out.tobytes()).hexdigest()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
