"""Any order of attaching, posting, stepping, detaching, dying and misbehaving: whoever is left gets exact answers."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from ffn_faas import native
from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.connectors.shm import ShmConnector, native_geometry
from ffn_faas.connectors.shm_client import fetch_windows
from tests.connectors.processes import NumpyKernel
from tests.native.hand_written_peer import HandWrittenPeer
from tests.native.world import oracle

EXPERTS, LAYERS, HIDDEN, TOP_K = 3, 2, 4, 2


class Session:
    """An attached client; ``posts`` by stage: (call, handle, x, ids, weights)."""

    def __init__(self, connector: ShmConnector, geometry: WindowGeometry, epoch: int) -> None:
        self.geometry, self.epoch = geometry, epoch
        self.link, offer = connector.open_link(geometry, epoch, [EXPERTS] * LAYERS)
        self.arena = fetch_windows(offer, geometry, epoch, 5)
        self.arena.poison()
        self.client = native.load().AttentionClient(native_geometry(geometry), [EXPERTS])
        self.client.set_layers([1, 0])
        self.client.set_link(0, self.arena)
        connector.activate_link(self.link)
        self.posts: dict[int, tuple] = {}

    def post(self, stage: int, rows: int, handle: int, rng: np.random.Generator) -> None:
        x = rng.integers(-8, 9, (rows, HIDDEN)).astype(np.float32)
        ids = rng.integers(-1, EXPERTS, (rows, TOP_K)).astype(np.int32)
        weights = (rng.integers(0, 5, ids.shape) / 4).astype(np.float32)
        module = native.load()
        call = module.Call(
            stage=stage,
            handle=handle,
            rows=rows,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            dtype=module.F32,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            ids_are_int64=False,
            weights=weights.ctypes.data,
        )
        self.client.dispatch(call)
        self.posts[stage] = (call, handle, x, ids, weights)

    def check(self) -> None:
        for call, handle, x, ids, weights in self.posts.values():
            out = np.full_like(x, np.nan)
            self.client.combine(call, out.ctypes.data)
            np.testing.assert_array_equal(out, oracle(1 - handle, x, ids, weights))
        self.posts.clear()


class SharedService(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.connector: ShmConnector | None = None
        self.alive: list[Session] = []
        self.all: list[Session] = []
        self.expected_faults: list[int] = []
        self.epoch = 0
        self.rng = np.random.default_rng(0)
        self.kernel = NumpyKernel(0)

    @precondition(lambda self: self.connector is None)
    @rule(item_limit=st.sampled_from([1, 3, 5, 4096]))
    def start(self, item_limit: int) -> None:
        self.connector = ShmConnector(item_limit=item_limit, merge_wait_us=0)

    @precondition(lambda self: self.connector is not None and len(self.alive) < 5)
    @rule(target=sessions, stages=st.integers(1, 2), capacity=st.integers(1, 9))
    def attach(self, stages: int, capacity: int) -> Session:
        self.epoch += 1
        session = Session(self.connector, WindowGeometry(stages, capacity, HIDDEN, TOP_K, 4), self.epoch)
        self.alive.append(session)
        self.all.append(session)
        return session

    @rule(session=sessions, stage=st.integers(0, 1), share=st.floats(0, 1), handle=st.integers(0, 1))
    def post(self, session: Session, stage: int, share: float, handle: int) -> None:
        if session in self.alive and stage < session.geometry.stages and stage not in session.posts:
            session.post(stage, round(share * session.geometry.capacity), handle, self.rng)

    @precondition(lambda self: self.connector is not None)
    @rule()
    def one_step(self) -> None:
        self.connector.step(self.kernel, 0.0)

    @precondition(lambda self: self.connector is not None)
    @rule()
    def every_post_is_answered_exactly(self) -> None:
        most = sum(session.geometry.capacity + 2 for session in self.alive for _ in range(2)) + 20
        for _ in range(most):
            self.connector.step(self.kernel, 0.0)
        for session in self.alive:
            session.check()

    @rule(session=consumes(sessions))
    def leave(self, session: Session) -> None:
        """Detached, or dead with posts outstanding: F sees the same."""
        if session in self.alive:
            self.alive.remove(session)
            self.connector.close_link(session.link)

    @rule(session=consumes(sessions), layer=st.sampled_from([-1, LAYERS]))
    def break_the_protocol(self, session: Session, layer: int) -> None:
        if session in self.alive and not session.posts:
            self.alive.remove(session)
            doorbell = self.connector._receiver.doorbell
            peer = HandWrittenPeer(session.arena.view(), doorbell, session.geometry, session.epoch)
            peer.sequence = session.client.counters()["posts"] if session.geometry.stages == 1 else 0
            if session.geometry.stages == 1:
                peer.post(layer, 0, [], [], b"")
                self.expected_faults.append(session.link)
            else:
                self.connector.close_link(session.link)

    @invariant()
    def faults_are_those_of_hostile_peers(self) -> None:
        if self.connector is not None:
            for link, _ in self.connector.take_faults():
                self.expected_faults.remove(link)

    def teardown(self) -> None:
        if self.connector is not None:
            self.every_post_is_answered_exactly()
            self.faults_are_those_of_hostile_peers()
            assert self.expected_faults == []
            self.connector.close()
            del self.connector
        for session in self.all:  # hypothesis keeps all of this; the windows must go
            del session.arena, session.client


SharedService.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSharedService = SharedService.TestCase
