"""Phases in legal order only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffn_faas.service.lifecycle import Lifecycle, Phase

TO_READY = (Phase.LOADING, Phase.CAPTURING, Phase.READY)


def test_the_way_to_ready_is_timed_phase_by_phase():
    now = [10.0]
    lifecycle = Lifecycle(clock=lambda: now[0])
    for phase in TO_READY:
        now[0] += 2.0
        lifecycle.advance(phase)
    snapshot = lifecycle.snapshot()
    assert snapshot.seconds == {"starting": 2.0, "loading": 2.0, "capturing": 2.0, "ready": 0.0}
    assert snapshot.time_to_ready_s == 6.0
    assert snapshot.progress == 1.0


@given(st.lists(st.sampled_from(list(Phase)), max_size=12))
def test_no_order_of_calls_leaves_an_end_state_or_reaches_ready_without_loading(phases):
    lifecycle, seen = Lifecycle(), [Phase.STARTING]
    for phase in phases:
        try:
            lifecycle.advance(phase)
        except ValueError:
            assert lifecycle.phase is seen[-1]
        else:
            seen.append(phase)
    if Phase.READY in seen:
        assert [phase for phase in seen if phase is not Phase.PAIRING][1:4] == list(TO_READY)
        assert Phase.PAIRING not in seen or seen.index(Phase.PAIRING) == 2
    for end in (Phase.STOPPED, Phase.FAILED):
        if end in seen:
            assert set(seen[seen.index(end) :]) == {end}


def test_failing_after_the_end_changes_nothing():
    lifecycle = Lifecycle()
    lifecycle.fail("first")
    lifecycle.fail("second")
    assert lifecycle.snapshot().reason == "first"


def test_listeners_hear_of_phases_and_of_each_percent_but_not_of_every_byte():
    lifecycle, heard = Lifecycle(), []
    forget = lifecycle.on_change(lambda: heard.append(lifecycle.snapshot().progress))
    lifecycle.advance(Phase.LOADING)
    for done in range(100_001):
        lifecycle.report(done, 100_000)
    assert 100 <= len(heard) <= 102
    forget()
    lifecycle.advance(Phase.CAPTURING)
    assert len(heard) <= 102


def test_an_unknown_order_is_an_error_that_names_both_phases():
    with pytest.raises(ValueError, match="starting -> ready"):
        Lifecycle().advance(Phase.READY)
