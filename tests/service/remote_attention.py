"""An A rank without vLLM as a process: attaches, posts a batch again and again, compares each answer with the first.

Its one argument is JSON: model, address, patience (seconds, 60), rounds (50), going_on (more rounds, after another
line), reattach (seconds, 0), until_reattached. Says "attached", waits for a line, then says "done N equal" or
"failed: reason".
"""

from __future__ import annotations

import json
import logging
import sys

import numpy as np

from ffn_faas import native
from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import data_plane
from ffn_faas.attention.loader import Model, attach_message
from ffn_faas.attention.session import AttentionSession, LossPolicy
from ffn_faas.credentials import Credentials
from ffn_faas.env import token

ROWS = 6


def main(arguments: dict) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    model = Model.read(arguments["model"], None, "bfloat16", dummy=True)
    attach = attach_message(AfdBlock(role="attention"), model, "test", 16)
    session = AttentionSession(
        arguments["address"], attach, data_plane.shared_memory(model.spec), logging.getLogger("attention"),
        LossPolicy(arguments.get("reattach", 0.0)),
    )  # fmt: skip
    session.attach(arguments.get("patience", 60), Credentials(token()))
    session.declare_layers(list(model.spec.layers))
    session.wait_ready(60)
    print("attached", flush=True)
    for rounds in filter(None, (arguments.get("rounds", 50), arguments.get("going_on"))):
        sys.stdin.readline()
        try:
            equal = post(session, model, {**arguments, "rounds": rounds})
        except RuntimeError as error:
            print(f"failed: {error}", flush=True)
        else:
            print(f"done {equal} equal", flush=True)
    session.close()


def post(session: AttentionSession, model: Model, arguments: dict) -> int:
    spec, rng, module = model.spec, np.random.default_rng(0), native.load()
    x = rng.integers(0x3C00, 0x3F80, (ROWS, spec.hidden_size)).astype(np.uint16)
    ids = rng.integers(0, spec.num_experts, (ROWS, spec.top_k)).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    first, after_reattaching, done = None, 0, 0
    for _ in range(arguments["rounds"]):
        out = np.zeros_like(x)
        call = module.Call(
            stage=0, handle=0, rows=ROWS, hidden_size=spec.hidden_size, top_k=spec.top_k, dtype=module.BF16,
            x=x.ctypes.data, ids=ids.ctypes.data, ids_are_int64=False, weights=weights.ctypes.data,
        )  # fmt: skip
        session.client.dispatch(call)
        session.client.combine(call, out.ctypes.data)
        first = out if first is None else first
        np.testing.assert_array_equal(out, first)
        assert out.any()
        done += 1
        after_reattaching += session.reattached > 0
        if arguments.get("until_reattached") and after_reattaching > 10:
            break
    return done


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
