"""A and F ranks start together over a real store, in any order, and a failure of one is the failure of all."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import threading
import time

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore, PrefixStore, TCPStore

from ffn_faas.ascend.coordinator import AttentionStartup, Coordinator, FfnStartup, Timing, warm_up_ids
from ffn_faas.ascend.shape import CamShape
from ffn_faas.errors import LaunchDisagreement, SessionLost, Stuck

SHAPE = CamShape(
    attention_ranks=4,
    ffn_ranks=2,
    num_experts=6,
    top_k=3,
    hidden_size=64,
    max_num_batched_tokens=20,
    tensor_parallel=2,
)
QUICK = Timing(wait=10.0, poll=0.005, receiver=2.0)
FIRST_LAYER = 3


class Broken(Exception):
    """What a rank of these tests fails with."""


class Run:
    """All ranks in threads of one process. ``breaks`` maps (world rank, step) to what happens there."""

    def __init__(self, store_of, breaks=None, modes=None, timing=QUICK, order=None, gap=0.0):
        self.events = []
        self.results = {}
        self.ranks = {}
        self._breaks = breaks or {}
        self._modes = modes or {}
        self._timing = timing
        self._store_of = store_of
        threads = []
        for rank in order or range(SHAPE.world_size):
            thread = threading.Thread(target=self._rank, args=(rank,), daemon=True)
            threads.append(thread)
            thread.start()
            time.sleep(gap)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def happens(self, rank, step):
        self.events.append((rank, step))
        action = self._breaks.get((rank, step))
        if action is not None:
            return action()
        return True

    def _rank(self, rank):
        is_attention = rank < SHAPE.attention_ranks
        made = (AttentionStartup if is_attention else FfnStartup)(
            self._store_of(rank), SHAPE, rank, lambda: self.happens(rank, "poll"), self._timing
        )
        self.ranks[rank] = made
        try:
            self.start(rank)
            self.results[rank] = None
        except (Broken, SessionLost, LaunchDisagreement, Stuck) as error:
            self.results[rank] = error

    def start(self, rank):
        made = self.ranks[rank]
        if isinstance(made, AttentionStartup):
            self.happens(rank, "before the store")
            made.run(lambda layer: self.happens(rank, f"warm-up of {layer}"))
            return
        mode = self._modes.get(rank, FIRST_LAYER)
        self.happens(rank, "before the store")
        made.agree(mode)
        if mode is not None:
            made.warm_up(lambda: self.happens(rank, "transactions"))
        made.complete(
            lambda: self.happens(rank, "capture"),
            lambda seconds: self.happens(rank, "receiver"),
        )

    def place(self, rank, step):
        return self.events.index((rank, step))


def breaking():
    raise Broken("on purpose")


@pytest.fixture
def store():
    return HashStore()


def test_all_orders_of_arrival_reach_ready_and_no_rank_is_early():
    for order in random.Random(0).sample(list(itertools.permutations(range(6))), 12):
        shared = HashStore()
        run = Run(lambda rank, shared=shared: shared, order=order, gap=0.004)
        assert set(run.results.values()) == {None}, run.results
        steps = [event for event in run.events if event[1] != "poll"]
        ended = [steps.index((rank, f"warm-up of {FIRST_LAYER}")) for rank in range(4)]
        begun = [steps.index((rank, "before the store")) for rank in range(6)]
        captured = [steps.index((rank, "capture")) for rank in (4, 5)]
        assert max(begun) < min(ended), "nobody dispatches before every F rank listens"
        assert max(ended) < min(captured), "a capture begins after every transaction has ended"


def test_over_tcp_with_one_client_each():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = Run(lambda rank: TCPStore("127.0.0.1", server.port, is_master=False, timeout=dt.timedelta(seconds=10)))
    assert set(run.results.values()) == {None}, run.results
    names = {made.nonce for made in run.ranks.values()}
    assert len(names) == 1
    assert len(names.pop()) == 32


def test_eager_needs_no_warm_up(store):
    run = Run(lambda rank: store, modes={4: None, 5: None})
    assert set(run.results.values()) == {None}
    assert not [event for event in run.events if "warm-up" in event[1] or event[1] == "transactions"]


def test_f_ranks_that_disagree_on_the_mode_fail_everybody_with_both_values(store):
    run = Run(lambda rank: store, modes={5: None})
    texts = [str(result) for result in run.results.values()]
    assert all("F rank 0: graph:3, F rank 1: eager" in text for text in texts), texts
    assert any(isinstance(result, LaunchDisagreement) for result in run.results.values())
    run = Run(lambda rank: PrefixStore("again", store), modes={5: FIRST_LAYER + 1})
    assert all("graph:4" in str(result) for result in run.results.values())


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (0, f"warm-up of {FIRST_LAYER}"),
        (3, f"warm-up of {FIRST_LAYER}"),
        (4, "transactions"),
        (4, "capture"),
        (5, "capture"),
        (5, "receiver"),
    ],
)
def test_a_failure_at_any_step_reaches_every_rank_with_its_reason(store, rank, step):
    run = Run(lambda r: store, {(rank, step): breaking})
    side = f"A rank {rank}" if rank < 4 else f"F rank {rank - 4}"
    assert isinstance(run.results[rank], Broken)
    for other in set(range(4)) - {rank}:
        assert f"{side} failed" in str(run.results[other])
        assert "Broken: on purpose" in str(run.results[other])
    with pytest.raises(SessionLost, match="pairing has failed before: on purpose"):
        run.start(rank)


def test_a_stop_while_it_waits_is_a_failure_of_the_pair(store):
    seen = itertools.count()
    run = Run(lambda rank: store, {(2, "poll"): lambda: next(seen) > 3 and breaking(), (4, "before the store"): pause})
    assert isinstance(run.results[2], Broken)
    assert "A rank 2 failed" in str(run.results[5])


def pause():
    time.sleep(0.2)


def test_a_receiver_that_does_not_start_is_no_readiness(store):
    run = Run(lambda rank: store, {(5, "receiver"): lambda: False})
    assert isinstance(run.results[5], Stuck)
    for rank in range(4):
        assert "F rank 1 failed" in str(run.results[rank])
        assert "did not start within 2 s" in str(run.results[rank])


def test_a_rank_that_never_comes_is_named_by_the_keys_it_owes(store):
    short = Timing(wait=0.3, poll=0.005)
    run = Run(lambda rank: store, timing=short, order=[0, 1, 2, 3, 4])
    texts = [str(run.results[rank]) for rank in range(5)]
    assert any("waited 0.3 s" in text and "ffn/mode/5" in text for text in texts), texts


def test_without_rank_zero_nothing_is_ever_published(store):
    short = Timing(wait=0.2, poll=0.005)
    run = Run(lambda rank: store, timing=short, order=[1, 4])
    assert all("A rank 0 to name this start" in str(result) for result in run.results.values())
    assert store.num_keys() == 0


def test_a_failure_before_the_store_exists_publishes_nothing(store):
    run = Run(lambda rank: store, {(0, "before the store"): breaking}, order=[0])
    assert isinstance(run.results[0], Broken)
    assert store.num_keys() == 0


def test_a_second_start_is_idempotent_then_refused_once_closed(store):
    run = Run(lambda rank: store)
    before = len(run.events)
    for rank in range(SHAPE.world_size):
        run.start(rank)
    steps = [step for _, step in run.events[before:] if step not in ("poll", "before the store")]
    assert steps == []
    for made in run.ranks.values():
        made.close()
    for rank in (0, 4):
        with pytest.raises(SessionLost, match="has been closed"):
            run.start(rank)


def test_a_failure_is_not_overwritten_by_a_late_ready(store):
    def late(seconds):
        made.publish_failure(Broken("meanwhile"))
        return True

    shape = CamShape(1, 1, 2, 1, 32, 4)
    made = FfnStartup(store, shape, 1, timing=QUICK)
    attention = AttentionStartup(store, shape, 0, timing=QUICK)
    outcome = []

    def attend():
        try:
            attention.run(lambda layer: None)
        except SessionLost as error:
            outcome.append(str(error))

    thread = threading.Thread(target=attend)
    thread.start()
    made.agree(None)
    with pytest.raises(SessionLost, match="meanwhile"):
        made.complete(lambda: None, late)
    thread.join(10)
    assert "F rank 0 failed while it paired with Attention: " in outcome[0]


def test_after_all_are_ready_a_failure_is_still_heard(store):
    run = Run(lambda rank: store)
    run.ranks[5].publish_failure(Broken("later"))
    with pytest.raises(SessionLost, match=r"F rank 1 failed .*later"):
        run.ranks[0].raise_if_failed()


def test_a_store_that_goes_away_is_an_error_that_says_so():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=dt.timedelta(seconds=2))
    made = Coordinator(client, SHAPE, 1, timing=Timing(wait=5.0, poll=0.01))
    outcome = []

    def wait():
        try:
            made.open()
        except SessionLost as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    del server
    thread.join(20)
    assert "the store of the rendezvous failed" in outcome[0]


def test_the_ids_of_the_warm_up_are_those_of_the_contract():
    """Two F ranks of three experts, three ids a row: n = 0..5 alternates ranks, then goes to the next expert."""
    assert warm_up_ids(0, SHAPE) == [0, 3, 1]
    assert warm_up_ids(1, SHAPE) == [4, 2, 5]
