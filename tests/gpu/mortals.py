"""Attention processes that live to be killed: forked from one that has imported torch, so that many are cheap.

Arguments: model directory, address of F, GPU, how often each. Prints ``killed KIND n`` for each kind of death: ``idle``
(attached, no kernel in flight), ``wait`` (posts of one row, one after the other: nearly always waiting), ``put`` (posts
of the largest size).
"""

import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ffn_faas.attention import device_ops
from ffn_faas.attention.data_plane import device_memory
from ffn_faas.attention.session import AttentionSession
from ffn_faas.connectors import m2n_client  # noqa: F401 - imported before the fork, as what follows
from ffn_faas.connectors.host_identity import host_identity
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Attach

ROWS = 2048
AT_ONCE = 5


def live(spec, address, gpu, kind, number, ready):
    torch.cuda.set_device(gpu)
    attach = Attach(
        protocol_version=PROTOCOL_VERSION,
        software_version="test",
        peer="test",
        instance=f"{kind}-{number}",
        attention_rank=0,
        num_attention_ranks=1,
        stages=1,
        capacity=ROWS,
        transport="m2n",
        host=host_identity(),
        fingerprint=fingerprint(spec, None),
    )
    plane = device_memory(spec, gpu, lethal=True)
    session = AttentionSession(address, attach, plane, logging.getLogger("mortal"))
    session.attach(60.0)
    session.declare_layers(list(spec.layers))
    session.wait_ready(60.0)
    ops = device_ops.DeviceOps(session.client)
    x = torch.randn(ROWS, spec.hidden_size, device="cuda").bfloat16()
    weights, ids = torch.softmax(torch.randn(ROWS, spec.num_experts, device="cuda"), -1).topk(spec.top_k, -1)

    rows = 1 if kind == "wait" else ROWS

    def post():
        ops.dispatch(x[:rows], weights[:rows], ids[:rows], 0, 0, 1)
        ops.combine(x[:rows], weights[:rows], ids[:rows], 0, 0, 1)

    post()
    torch.cuda.synchronize()
    os.write(ready, b"r")
    while kind != "idle":
        post()
    time.sleep(600)


def main(model, address, gpu, count):
    spec = MoESpec.from_model_dir(Path(model))
    generator = random.Random(3)
    for kind in ("idle", "wait", "put"):
        for begin in range(0, int(count), AT_ONCE):
            children = []
            for number in range(begin, min(begin + AT_ONCE, int(count))):
                reads, writes = os.pipe()
                child = os.fork()
                if child == 0:
                    os.close(reads)
                    try:
                        live(spec, address, int(gpu), kind, number, writes)
                    finally:
                        os._exit(1)
                os.close(writes)
                children.append((child, reads))
            for _, reads in children:
                if os.read(reads, 1) != b"r":
                    sys.exit(f"{kind}: a process ended before it was killed")
                os.close(reads)
            for child, _ in children:
                time.sleep(generator.random() * 0.03)
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                    sys.exit(f"{kind}: a process ended by itself: {status}")
        print(f"killed {kind} {count}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
