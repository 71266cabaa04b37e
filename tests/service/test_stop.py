"""One stop for all who ask."""

import pytest

from ffn_faas.errors import WorldLost
from ffn_faas.service import host
from ffn_faas.service.lifecycle import Phase
from ffn_faas.service.stop import Stopped, StopRequest
from tests.http.conftest import Service


def test_the_first_request_wins_and_wakes_everyone():
    stop, woken = StopRequest(), []
    stop.on_request(lambda: woken.append("before"))
    assert stop.request("SIGTERM")
    assert not stop.request("later")
    stop.on_request(lambda: woken.append("after"))
    assert woken == ["before", "after"]
    assert stop.reason == "SIGTERM"
    with pytest.raises(Stopped):
        stop.raise_if_requested()


def test_a_failure_is_raised_as_itself():
    stop = StopRequest()
    stop.raise_if_requested()
    stop.request("rank 1 lost", WorldLost("rank 1 lost"))
    with pytest.raises(WorldLost):
        stop.raise_if_requested()


def test_a_stop_that_was_asked_for_may_turn_into_a_failure_once_and_everyone_hears_of_it():
    stop, woken = StopRequest(), []
    stop.on_request(lambda: woken.append(stop.error))
    stop.request("SIGTERM")
    lost = WorldLost("rank 1 lost")
    assert not stop.request("rank 1 lost", lost)
    assert not stop.request("rank 2 lost", WorldLost("rank 2 lost"))
    assert not stop.request("SIGINT")
    assert woken == [None, lost]
    assert stop.reason == "SIGTERM; then rank 1 lost"


def test_a_stop_under_way_is_told_to_hurry_once_and_stays_what_it_was():
    stop, woken = StopRequest(), []
    stop.on_request(lambda: woken.append(stop.limit_s))
    stop.request("SIGTERM")
    stop.request("the launcher is gone", limit_s=9.0)
    stop.request("again", limit_s=1.0)
    assert woken == [None, 9.0]
    assert stop.error is None


class QuickBackend:
    """Ends at once."""

    pairs = False

    def drain(self, deadline_s):
        pass


def test_a_step_loop_that_ends_before_the_phase_was_changed_is_a_clean_stop_all_the_same():
    service = Service()
    state = service.state
    try:
        service.to_ready()
        state.stop.request("SIGTERM")  # nobody has told the lifecycle: the thread that asks is still on its way to it
        host._stop(state, QuickBackend())
    finally:
        service.server.shutdown()
    assert state.lifecycle.phase is Phase.STOPPED
    assert "draining" in state.lifecycle.snapshot().seconds
