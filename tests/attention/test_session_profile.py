"""F asks an Attention for the times of its posts: sent is what the client kept, and a silent device costs only that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ffn_faas.errors import ResourceError
from ffn_faas.protocol.messages import Profile, Profiled

from .fake_client import NAMES, session_to
from .fake_f import Peer, fake_f, serving


def asked_for_times(prepare: Callable[[Any], None]) -> Profiled:
    """What a session sends to an F that asks for three posts, then for what was kept; ``prepare`` gets its client."""
    answers: list[Any] = []
    addresses: list[str] = []
    answered = threading.Event()

    def then(peer: Peer) -> None:
        peer.say(Profile(posts=3), Profile(posts=0))
        answers.append(peer.hear())
        answered.set()
        peer.listen_to_the_end()

    with fake_f(serving(addresses, 0, then)) as found:
        addresses += found
        session = session_to(addresses[0])
        session.attach(5.0)
        prepare(session.client)
        session.declare_layers(NAMES)
        assert answered.wait(5.0)
        session.close()
    (profiled,) = answers
    assert isinstance(profiled, Profiled)
    return profiled


def test_f_that_asks_for_times_of_posts_gets_what_the_client_kept() -> None:
    asked: list[int] = []
    kept = [(1, 2, 3, 4, 5, 0, 1, 16)]

    def prepare(client: Any) -> None:
        client.record, client.take_spans = asked.append, lambda: kept

    profiled = asked_for_times(prepare)
    assert asked == [3]
    assert profiled.spans == kept
    assert abs(profiled.clock_offset_ns + time.monotonic_ns() - time.time_ns()) < 10**9


def test_a_client_that_keeps_no_times_sends_none() -> None:
    assert asked_for_times(lambda client: None).spans == []


def test_a_device_that_does_not_answer_costs_the_times_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: int) -> list[Any]:
        raise ResourceError("GPU: observer: the context has ended")

    def prepare(client: Any) -> None:
        client.record = client.take_spans = broken

    assert asked_for_times(prepare).spans == []
    assert sum("Times of posts are not to be had: GPU: observer" in record.message for record in caplog.records) == 2
