"""One stop for all who ask."""

import pytest

from ffn_faas.errors import WorldLost
from ffn_faas.service.stop import Stopped, StopRequest


def test_the_first_request_wins_and_wakes_everyone():
    stop, woken = StopRequest(), []
    stop.on_request(lambda: woken.append("before"))
    assert stop.request("SIGTERM")
    assert not stop.request("later", WorldLost("lost"))
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
