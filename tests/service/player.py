"""Attention played by numpy over a real session; as a process it goes as far as it is told, then waits to be killed.

One JSON argument: port, model, instance, until. Prints each step when it is done: granted, declared, attached, half
(rows are written and the flag is not; over TCP: half of a post's head is sent), dispatched, answered. A line on stdin
lets it go on: through the rest of the handshake, and to an answer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
from pathlib import Path

import numpy as np

from ffn_faas import native
from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import data_plane
from ffn_faas.attention.loader import Model, attach_message
from ffn_faas.attention.session import AttentionSession, LossPolicy
from ffn_faas.protocol.stream import POST
from ffn_faas.protocol.window import flag
from tests.native.world import oracle

HANDSHAKE = ("granted", "declared", "attached")
STEPS = (*HANDSHAKE, "half", "dispatched")
TIMEOUT_S = 60.0


class Player:
    """One A rank. Every answer is checked against the oracle, exactly."""

    def __init__(self, port, model, instance, policy=None, rank=0, size=1, capacity=64):
        self.model = Model.read(str(model), None, "float32", True)
        attach = attach_message(AfdBlock(role="attention", port=port), self.model, "numpy", capacity)
        update = {"instance": instance, "attention_rank": rank, "num_attention_ranks": size}
        plane = data_plane.shared_memory(self.model.spec)
        self._fetch, self._data_ports = plane.fetch_windows, set[int]()
        plane = dataclasses.replace(plane, fetch_windows=self._fetch_noting_the_port)
        log = logging.getLogger(f"tests.player.{instance}")
        attach = attach.model_copy(update=update)
        self.session = AttentionSession(f"127.0.0.1:{port}", attach, plane, log, policy or LossPolicy(0.0, 600.0))
        self._number = 0

    def _fetch_noting_the_port(self, offer, geometry, epoch, timeout):
        if offer.broker.startswith("tcp:"):
            self._data_ports.add(int(offer.broker.rpartition(":")[2]))
        return self._fetch(offer, geometry, epoch, timeout)

    def granted(self):
        self.session.attach(TIMEOUT_S)

    def declared(self):
        self.session.declare_layers(list(self.model.spec.layers))

    def attached(self):
        self.session.wait_ready(TIMEOUT_S)

    def join(self):
        """All of the handshake."""
        self.granted()
        self.declared()
        self.attached()
        return self

    def half(self):
        """As far as a killed process may have come: rows in the windows and no flag, or part of a post on its way."""
        for arena in self.session._attempt.arenas.values():
            arena.poison()
        for entry in Path("/proc/self/fd").iterdir():
            if peer_port(entry) in self._data_ports:
                os.write(int(entry.name), POST.pack(flag(1, 1), 0, 0, 24, 0)[: POST.size // 2])

    def dispatched(self):
        self._number += 1
        rng = np.random.default_rng(self._number)
        spec, module = self.model.spec, native.load()
        x = rng.integers(-8, 9, (24, spec.hidden_size)).astype(np.float32)
        ids = rng.integers(0, spec.num_experts, (24, spec.top_k)).astype(np.int32)
        weights = (rng.integers(0, 5, ids.shape) / 4).astype(np.float32)
        layer = self._number % len(spec.layers)
        call = module.Call(
            stage=0,
            handle=layer,
            rows=len(x),
            hidden_size=spec.hidden_size,
            top_k=spec.top_k,
            dtype=module.F32,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=False,
            weights=weights.ctypes.data,
        )
        self._post = (call, layer, x, ids, weights)
        self.session.client.dispatch(call)

    def answered(self):
        """Blocks until every F rank has answered; raises what ends the session."""
        call, layer, x, ids, weights = self._post
        out = np.full_like(x, np.nan)
        self.session.client.combine(call, out.ctypes.data)
        np.testing.assert_array_equal(out, oracle(layer, x, ids, weights))

    def step(self):
        self.dispatched()
        self.answered()

    @property
    def is_over(self):
        """Whether this Attention knows that it has lost F."""
        return self.session._failed or self.session._lost is not None

    def close(self):
        self.session.close()


def peer_port(entry):
    """Where a descriptor of this process, an entry of /proc/self/fd, is connected to over TCP, else None."""
    try:
        if not str(entry.readlink()).startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(int(entry.name))) as connection:
            return connection.getpeername()[1] if connection.family == socket.AF_INET else None
    except OSError:
        return None


def main(arguments):
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    player = Player(arguments["port"], arguments["model"], arguments["instance"])
    for step in STEPS[: STEPS.index(arguments["until"]) + 1]:
        if step == "half" and arguments["until"] == "dispatched":
            continue
        getattr(player, step)()
        print(step, flush=True)
    sys.stdin.readline()
    if arguments["until"] in HANDSHAKE:
        for step in HANDSHAKE[HANDSHAKE.index(arguments["until"]) + 1 :]:
            getattr(player, step)()
    if arguments["until"] == "dispatched":
        player.answered()
    else:
        player.step()
    print("answered", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
