"""For whom an item waits before it is computed, and for how long."""

import threading
import time

import pytest

from tests.native.sessions import Sessions
from tests.native.world import answer

WAIT_S = 0.05
"""Of a receiver that waits: half of how long "just before" lasts, so that a loaded machine may be late by as much."""
ATTEMPTS = 5
"""The median tells waiting from not waiting, unless three of them are disturbed."""


class InStep(Sessions):
    """A receiver that waits, and how long it does."""

    def __init__(self, count: int = 2, wait_s: float = WAIT_S, **options: int) -> None:
        super().__init__(count, merge_wait_us=round(wait_s * 1e6), **options)

    def serve(self, *keys: int, handle: int = 0, stage: int = 0, compute_s: float = 0) -> None:
        """Each posts a row of that layer; one item."""
        for key in keys:
            self.post(key, 1, handle, stage)
        item = self.receiver.receive(0)
        assert sorted(link for link, _, _ in item.parts) == sorted(keys)
        answer(item, 0, "float32")
        time.sleep(compute_s)
        item.complete()
        self.check(*keys, stage=stage)

    def seconds(self, rows: int = 1) -> float:
        """Of taking what link 0 posts now, of layer 1."""
        self.post(0, rows, 1)
        begin = time.monotonic()
        item = self.receiver.receive(0)
        taken = time.monotonic() - begin
        answer(item, 0, "float32")
        item.complete()
        self.check(0)
        return taken


def median(once) -> float:
    return sorted(once() for _ in range(ATTEMPTS))[ATTEMPTS // 2]


def test_an_item_waits_for_links_that_were_answered_with_its_first_one() -> None:
    sessions = InStep()

    def once() -> float:
        sessions.serve(0, 1)
        return sessions.seconds()

    assert median(once) >= WAIT_S


def test_a_post_that_comes_while_an_item_waits_joins_it() -> None:
    sessions = InStep()
    for _ in range(10 * ATTEMPTS):  # a loaded machine may start the thread too late
        sessions.serve(0, 1)
        sessions.post(0, 2, 1)
        thread = threading.Timer(0.01, sessions.post, args=(1, 3, 1))
        thread.start()
        taken = sessions.item()
        thread.join()
        if taken == [(0, 2)]:
            assert sessions.item() == [(1, 3)]
        sessions.check(0, 1)
        if taken == [(0, 2), (1, 3)]:
            return
    raise AssertionError(taken)


def not_for_an_idle_link(sessions: InStep) -> float:
    sessions.serve(0, 1)
    time.sleep(0.15)
    return sessions.seconds()


def not_for_a_link_at_another_layer(sessions: InStep) -> float:
    sessions.serve(1, handle=1)
    sessions.serve(0)
    return sessions.seconds()


def not_for_the_next_chunk_of_a_batch(sessions: InStep) -> float:
    sessions.serve(0, 1, handle=1)
    return sessions.seconds()


def not_with_an_empty_post(sessions: InStep) -> float:
    sessions.serve(0, 1)
    return sessions.seconds(rows=0)


def not_for_a_link_that_is_gone(sessions: InStep) -> float:
    sessions.serve(0, 1)
    sessions.receiver.remove_link(1)
    seconds = sessions.seconds()
    sessions.attach(1)
    return seconds


def not_while_another_layer_is_there(sessions: InStep) -> float:
    sessions.serve(0, 1)
    sessions.post(1, 1, 1)
    sessions.post(2, 1)
    begin = time.monotonic()
    assert sessions.item() == [(1, 1)]
    taken = time.monotonic() - begin
    assert sessions.item() == [(2, 1)]
    sessions.check(1, 2)
    return taken


@pytest.mark.parametrize(
    ("once", "count"),
    [
        (not_for_an_idle_link, 2),
        (not_for_a_link_at_another_layer, 2),
        (not_for_the_next_chunk_of_a_batch, 2),
        (not_with_an_empty_post, 2),
        (not_for_a_link_that_is_gone, 2),
        (not_while_another_layer_is_there, 3),
    ],
)
def test_nobody_waits_in_vain(once, count: int) -> None:
    sessions = InStep(count)
    assert median(lambda: once(sessions)) < WAIT_S


def test_the_stages_of_links_in_step_take_turns_and_are_not_waited_for() -> None:
    sessions = InStep(stages=2)

    def once() -> float:
        for stage in (0, 1):
            sessions.serve(0, 1, stage=stage)
        begin = time.monotonic()
        sessions.serve(0, 1, handle=1)
        return time.monotonic() - begin

    assert median(once) < WAIT_S


def test_the_last_part_of_a_long_post_waits_for_nobody() -> None:
    sessions = InStep(item_limit=4)

    def once() -> float:
        sessions.serve(0, 1)
        sessions.post(0, 6, 1)
        assert sessions.item() == [(0, 4)]
        begin = time.monotonic()
        assert sessions.item() == [(0, 2)]
        taken = time.monotonic() - begin
        sessions.check(0)
        return taken

    assert median(once) < WAIT_S


def test_an_item_that_waits_goes_on_at_once_when_the_receiver_is_cancelled() -> None:
    sessions = InStep(wait_s=0.09)

    def once() -> float:
        sessions.serve(0, 1)
        thread = threading.Timer(0.01, sessions.receiver.cancel)
        thread.start()
        taken = sessions.seconds()
        thread.join()
        assert sessions.receiver.receive(0) is None, "the cancel is for the next receive as well"
        return taken

    assert median(once) < WAIT_S


@pytest.mark.parametrize(("compute_s", "least_s", "most_s"), [(0.064, 0.002, 0.05), (0.32, 0.004, 0.0095)])
def test_items_wait_for_a_part_of_what_a_step_takes_and_never_for_long(
    compute_s: float, least_s: float, most_s: float
) -> None:
    """A 32nd, 2 ms and 10 ms, but no more than 4 ms, where 1 us is asked for; empty items in between tell nothing."""
    sessions = InStep(3, wait_s=1e-6)

    def once() -> float:
        sessions.serve(0, 1, compute_s=compute_s)
        sessions.post(2, 0, 1)
        assert sessions.item() == [(2, 0)]
        sessions.check(2)
        return sessions.seconds()

    assert least_s <= median(once) < most_s
