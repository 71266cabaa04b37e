"""Who is replaced, who ends and who stays when A ranks leave a session and attach again."""

from ffn_faas.service.sessions import Limits, Link, SessionRegistry
from tests.attention.fake_f import ATTACH


def attach(rank=0, attempt=0, instance="i"):
    changes = {"attention_rank": rank, "num_attention_ranks": 2, "attempt": attempt, "instance": instance}
    return ATTACH.model_copy(update=changes)


def join(registry, message):
    closed = []
    link = Link(message.attention_rank, "p", lambda reason, final: closed.append((reason, final)), 100, message.attempt)
    assert registry.conflict(message) is None
    assert registry.over_limit(message, 100) is None
    return registry.join(message, 16, link), link, closed


def test_a_later_attempt_replaces_what_is_left_of_an_earlier_one_and_disturbs_no_sibling():
    registry = SessionRegistry(Limits(max_sessions=1, window_memory=200))
    session, stale, closed = join(registry, attach(0))
    _, sibling, sibling_closed = join(registry, attach(1))
    again, link, _ = join(registry, attach(0, attempt=1))
    assert again is session
    assert [final for _, final in closed] == [False]
    assert link.epoch not in (stale.epoch, sibling.epoch)
    assert registry.leave(session, stale, "its connection closed") == []
    assert session.links == {0: link, 1: sibling}
    assert sibling_closed == []


def test_the_same_attempt_twice_is_a_conflict():
    registry = SessionRegistry()
    join(registry, attach(0, attempt=2))
    assert "already attached" in registry.conflict(attach(0, attempt=2))
    assert "already attached" in registry.conflict(attach(0, attempt=1))


def test_a_rank_that_will_return_leaves_its_siblings_attached_and_one_that_dies_does_not():
    registry = SessionRegistry()
    session, first, _ = join(registry, attach(0))
    _, second, _ = join(registry, attach(1))
    assert registry.leave(session, first, "it detached", returning=True) == []
    session, first, _ = join(registry, attach(0, attempt=1))
    assert registry.leave(session, first, "its connection closed") == [second]
    assert registry.snapshot() == []


def test_an_instance_of_which_every_rank_returns_is_forgotten():
    registry = SessionRegistry()
    session, link, _ = join(registry, attach(0))
    assert registry.leave(session, link, "it detached", returning=True) == []
    assert registry.snapshot() == []


def test_only_the_end_of_f_is_not_final():
    registry = SessionRegistry()
    _, link, closed = join(registry, attach(0))
    link.window = 7
    registry.end_window(7, "broke the protocol")
    registry.end_all("F stopped")
    assert closed == [("broke the protocol", True), ("F stopped", False)]
