"""Any order of attaching, posting, stepping, detaching, coming back, dying and misbehaving, over real WebSockets:
F knows exactly who is there, holds no window of anyone else, and answers whoever is left exactly."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from websockets.exceptions import ConnectionClosed

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry, WindowOffer
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from ffn_faas.protocol import messages
from ffn_faas.protocol.window import window_layout
from ffn_faas.service.sessions import SessionRegistry
from tests.connectors.processes import NumpyKernel
from tests.http.conftest import Service, attach_message, receive
from tests.native.world import from_wire, oracle, to_wire

GEOMETRY = WindowGeometry(1, 8, 64, 2, 2)
PAIR = window_layout(GEOMETRY).nbytes
PATIENCE_S = 10.0


class Bf16Kernel(NumpyKernel):
    def __init__(self):
        super().__init__(0)
        self.spec.dtype = "bfloat16"

    def compute(self, layer, hidden, expert_ids, weights, out):
        super().compute(layer, hidden.float(), expert_ids, weights, out)


class Rank:
    """One attached A rank and its client."""

    def __init__(self, service, instance, rank, attempt=0):
        self.instance, self.rank, self.attempt = instance, rank, attempt
        self.socket = ExitStack().enter_context(service.socket())
        self.socket.send(
            attach_message(
                instance=instance,
                attention_rank=rank,
                num_attention_ranks=2,
                capacity=GEOMETRY.capacity,
                attempt=attempt,
            )
        )
        answer = receive(self.socket, "granted", "refused")
        self.refusal = answer["reason"] if answer["type"] == "refused" else None
        if self.refusal is not None:
            self.socket.close()
            return
        windows = receive(self.socket, "windows")
        offer = WindowOffer(windows["broker"], windows["ticket"], windows["nbytes"])
        self.arena = fetch_windows(offer, GEOMETRY, answer["epoch"], 5)
        self.client = native.load().AttentionClient(native_geometry(GEOMETRY), [8])
        self.client.set_layers([0, 1])
        self.client.set_link(0, self.arena)
        self.socket.send(messages.WindowsMapped().model_dump_json())
        receive(self.socket, "attached")
        self.post = None

    def dispatch(self, seed, layer):
        rng = np.random.default_rng(seed)
        x = to_wire(rng.integers(-8, 9, (5, 64)).astype(np.float32), "bfloat16")
        ids = rng.integers(-1, 8, (5, 2)).astype(np.int32)
        weights = (rng.integers(0, 5, ids.shape) / 4).astype(np.float32)
        module = native.load()
        call = module.Call(
            stage=0,
            handle=layer,
            rows=5,
            hidden_size=64,
            top_k=2,
            dtype=module.BF16,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=False,
            weights=weights.ctypes.data,
        )
        self.client.dispatch(call)
        self.post = (call, layer, x, ids, weights)

    def check(self):
        call, layer, x, ids, weights = self.post
        out = np.zeros_like(x)
        self.client.combine(call, out.ctypes.data)
        exact = oracle(layer, from_wire(x, "bfloat16"), ids, weights).astype(np.float32)
        want = from_wire(to_wire(exact, "bfloat16"), "bfloat16")
        np.testing.assert_array_equal(from_wire(out, "bfloat16"), want)
        self.post = None

    def ended(self):
        """F's last word; None when the socket just closed."""
        try:
            while True:
                message = json.loads(self.socket.recv(timeout=PATIENCE_S))
                if message["type"] == "ended":
                    return message
        except ConnectionClosed:
            return None


class Sessions(RuleBasedStateMachine):
    ranks = Bundle("ranks")
    service: Service

    def __init__(self):
        super().__init__()
        self.service.state.sessions = SessionRegistry()
        self.connector = self.service.connector = self.service.state.connector = ShmConnector(merge_wait_us=0)
        self.kernel = Bf16Kernel()
        self.alive: dict[tuple[str, int], Rank] = {}
        self.seed = 0

    def instance_of(self, name):
        return {key: rank for key, rank in self.alive.items() if key[0] == name}

    def lose(self, rank):
        """``rank`` is gone without a goodbye: so are its siblings."""
        del self.alive[rank.instance, rank.rank]
        for sibling in self.instance_of(rank.instance).values():
            message = sibling.ended()
            assert message is not None
            assert message["final"]
            assert f"A rank {rank.rank}/2" in message["reason"]
            sibling.socket.close()
            del self.alive[sibling.instance, sibling.rank]

    @rule(target=ranks, instance=st.sampled_from("abc"), number=st.integers(0, 1), again=st.booleans())
    def attach(self, instance, number, again):
        there = self.alive.get((instance, number))
        rank = Rank(self.service, instance, number, (there.attempt if there else 0) + again)
        if there is not None and not again:
            assert "already attached" in rank.refusal
            return rank
        assert rank.refusal is None
        if there is not None:
            assert not there.ended()["final"]
            there.socket.close()
        self.alive[instance, number] = rank
        return rank

    @rule(rank=ranks, layer=st.integers(0, 1))
    def post(self, rank, layer):
        if rank in self.alive.values() and rank.post is None:
            self.seed += 1
            rank.dispatch(self.seed, layer)

    @rule()
    def step(self):
        self.connector.step(self.kernel, 0.0)

    @rule()
    def every_post_is_answered(self):
        for _ in range(20):
            self.connector.step(self.kernel, 0.0)
        for rank in self.alive.values():
            if rank.post is not None:
                rank.check()

    @rule(rank=consumes(ranks), returning=st.booleans())
    def detach(self, rank, returning):
        if rank in self.alive.values():
            rank.socket.send(messages.Detach(returning=returning).model_dump_json())
            del self.alive[rank.instance, rank.rank]
            rank.ended()

    @rule(rank=consumes(ranks))
    def kill(self, rank):
        if rank in self.alive.values():
            rank.socket.socket.shutdown(2)
            self.lose(rank)

    @rule(rank=consumes(ranks))
    def break_the_protocol(self, rank):
        if rank in self.alive.values() and rank.post is None:
            rank.client.set_layers([7, 7])
            rank.dispatch(1, 0)
            for _ in range(20):
                self.connector.step(self.kernel, 0.0)
                for window, reason in self.connector.take_faults():
                    self.service.state.sessions.end_window(window, reason)
            message = rank.ended()
            assert message["final"]
            assert "names layer 7 of 2" in message["reason"]
            self.lose(rank)

    @invariant()
    def f_knows_exactly_who_is_there(self):
        deadline = time.monotonic() + PATIENCE_S
        expected = sorted(self.alive)
        while (seen := self._seen()) != (expected, len(expected)) or self._bytes() != len(expected) * PAIR:
            assert time.monotonic() < deadline, f"F has {seen}, there are {expected}"
            time.sleep(0.002)

    def _seen(self):
        sessions = self.service.state.sessions.snapshot()
        links = [(session.instance, rank) for session in sessions for rank in list(session.links)]
        return sorted(links), len(self.connector._links)

    def _bytes(self):
        return self.service.state.sessions.window_bytes

    def teardown(self):
        self.every_post_is_answered()
        for rank in list(self.alive.values()):
            if rank in self.alive.values():
                rank.socket.socket.shutdown(2)
                self.lose(rank)
        self.f_knows_exactly_who_is_there()
        self.connector.close()


def test_any_order_of_coming_and_going_leaves_f_knowing_exactly_who_is_there():
    service = Service()
    try:
        service.to_ready()
        Sessions.service = service
        machine = Sessions.TestCase()
        machine.settings = settings(
            max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        machine.runTest()
    finally:
        service.server.shutdown()
