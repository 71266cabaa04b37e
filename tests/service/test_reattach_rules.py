"""Who is replaced, who ends and who stays when A ranks leave a session and attach again."""

import pytest

from ffn_faas.service.sessions import Cause, Ending, Limits, Link, SessionRegistry
from tests.attention.fake_f import ATTACH


def attach(rank=0, attempt=0, instance="i"):
    changes = {"attention_rank": rank, "num_attention_ranks": 2, "attempt": attempt, "instance": instance}
    return ATTACH.model_copy(update=changes)


def join(registry, message):
    closed = []
    link = Link(message.attention_rank, "p", closed.append, 100, message.attempt)
    assert registry.conflict(message) is None
    assert registry.over_limit(message, 100) is None
    return registry.join(message, 16, link), link, closed


def test_a_later_attempt_replaces_what_is_left_of_an_earlier_one_and_disturbs_no_sibling():
    registry = SessionRegistry(Limits(max_sessions=1, window_memory=200))
    session, stale, closed = join(registry, attach(0))
    _, sibling, sibling_closed = join(registry, attach(1))
    again, link, _ = join(registry, attach(0, attempt=1))
    assert again is session
    assert [(ending.cause, ending.final) for ending in closed] == [(Cause.REPLACED, False)]
    assert link.epoch not in (stale.epoch, sibling.epoch)
    assert registry.leave(session, stale, Cause.CONNECTION_LOST) == []
    assert session.links == {0: link, 1: sibling}
    assert sibling_closed == []


def test_the_same_attempt_twice_is_a_conflict():
    registry = SessionRegistry()
    join(registry, attach(0, attempt=2))
    assert "already attached" in registry.conflict(attach(0, attempt=2))
    assert "already attached" in registry.conflict(attach(0, attempt=1))


@pytest.mark.parametrize("cause", [Cause.RETURNING, Cause.DETACHED])
def test_a_rank_that_leaves_in_order_leaves_its_siblings_attached_and_one_that_dies_does_not(cause):
    registry = SessionRegistry()
    session, first, _ = join(registry, attach(0))
    _, second, second_closed = join(registry, attach(1))
    assert registry.leave(session, first, cause) == []
    assert second_closed == []
    session, first, _ = join(registry, attach(0, attempt=1))
    assert registry.leave(session, first, Cause.CONNECTION_LOST) == [second]
    assert registry.snapshot() == []


def test_an_instance_of_which_every_rank_returns_is_forgotten():
    registry = SessionRegistry()
    session, link, _ = join(registry, attach(0))
    assert registry.leave(session, link, Cause.RETURNING) == []
    assert registry.snapshot() == []


def test_only_the_end_of_f_is_not_final():
    registry = SessionRegistry()
    _, link, closed = join(registry, attach(0))
    link.window = 7
    registry.end_window(7, "broke the protocol")
    registry.end_all(Cause.F_STOPPED, "F stopped")
    assert closed == [
        Ending(Cause.PROTOCOL_BROKEN, "broke the protocol", final=True),
        Ending(Cause.F_STOPPED, "F stopped", final=False),
    ]


def test_the_memory_in_which_posts_are_merged_counts_once_there_is_something_to_merge():
    registry = SessionRegistry(Limits(window_memory=350), merge_bytes=100)
    join(registry, attach(0))
    assert (registry.window_bytes, registry.shared_bytes) == (100, 0)
    session, link, _ = join(registry, attach(1))
    assert (registry.window_bytes, registry.shared_bytes) == (200, 100)
    assert "300 of 350" in registry.over_limit(attach(0, instance="j"), 100)
    registry.leave(session, link, Cause.DETACHED)
    assert (registry.window_bytes, registry.shared_bytes) == (100, 100)


def test_a_second_rank_is_refused_when_its_windows_fit_but_the_memory_for_merging_does_not():
    registry = SessionRegistry(Limits(window_memory=250), merge_bytes=100)
    join(registry, attach(0))
    reason = registry.over_limit(attach(1), 100)
    assert "100 bytes and 100 for merging" in reason
    assert "--window-memory" in reason


def test_two_stages_of_one_rank_are_merged_too():
    registry = SessionRegistry(Limits(window_memory=150), merge_bytes=100)
    assert registry.over_limit(attach(0), 100) is None
    assert "for merging" in registry.over_limit(attach(0).model_copy(update={"stages": 2}), 100)
