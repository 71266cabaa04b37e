"""Pull's sessions over operators made for these tests, since none are public: only the life of the window shows."""

from __future__ import annotations

import pytest

from ffn_faas.ascend.pull import PullAttention, PullFfn
from ffn_faas.errors import SessionLost


class Operators:
    """Records the calls; ``breaks`` names those that fail. ``owned`` is what the session held when it was called."""

    def __init__(self, breaks=()):
        self.calls, self.breaks, self.session, self.owned = [], set(breaks), None, []

    def _called(self, name):
        self.calls.append(name)
        if isinstance(self.session, PullAttention):
            self.owned.append(self.session.owner)
        if name in self.breaks:
            raise RuntimeError(f"{name} failed on the device")

    def dispatch(self, layer, x, expert_ids, weights):
        self._called("dispatch")

    def combine(self):
        self._called("combine")
        return "sums"

    def transaction(self):
        self._called("transaction")


def attention(*breaks):
    operators, said = Operators(breaks), []
    operators.session = session = PullAttention(operators, said.append)
    return session, operators, said


def test_the_window_has_its_owner_before_the_device_hears_of_it_and_none_after():
    session, operators, _ = attention()
    session.dispatch(1, 7, "x", "ids", "weights")
    assert operators.owned[0].stage == 1
    assert operators.owned[0].routing == ("x", "ids", "weights")
    assert session.combine(1) == "sums"
    assert session.owner is None


def test_one_window_is_in_flight_over_all_stages():
    session, operators, _ = attention()
    session.dispatch(0, 7, "x", "ids", "weights")
    for stage in (0, 1):
        with pytest.raises(SessionLost, match="stage 0 has the only window"):
            session.dispatch(stage, 7, "x", "ids", "weights")
    with pytest.raises(SessionLost, match="stage 1 does not have the window"):
        session.combine(1)
    assert operators.calls == ["dispatch"]


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_failure_keeps_window_and_routing_and_nothing_follows_it(step):
    session, operators, said = attention(step)

    def exchange():
        session.dispatch(0, 7, "x", "ids", "weights")
        session.combine(0)

    with pytest.raises(RuntimeError, match=f"{step} failed"):
        exchange()
    assert session.owner.routing == ("x", "ids", "weights")
    operators.breaks.clear()
    with pytest.raises(SessionLost, match="failed with the only window"):
        session.dispatch(1, 8, "y", "ids", "weights")
    with pytest.raises(SessionLost, match="does not have the window"):
        session.combine(0)
    with pytest.raises(SessionLost, match="cannot become quiet"):
        session.quiesce()
    assert said == []


def test_quiet_is_published_once_and_ends_dispatching():
    session, _, said = attention()
    session.dispatch(0, 7, "x", "ids", "weights")
    with pytest.raises(SessionLost, match="not free"):
        session.quiesce()
    session.combine(0)
    session.quiesce()
    session.quiesce()
    assert said == ["pull_quiet"]
    with pytest.raises(SessionLost, match="has ended"):
        session.dispatch(0, 7, "x", "ids", "weights")


def ffn(*breaks, quiet=True):
    operators, said = Operators(breaks), []
    return PullFfn(operators, lambda: quiet, said.append), operators, said


def test_f_has_transactions_only():
    session, operators, _ = ffn()
    for call in (session.receive, lambda: session.send("y")):
        with pytest.raises(SessionLost, match=r"transaction\(\) is one operator"):
            call()
    session.transaction()
    assert operators.calls == ["transaction"]


def test_f_drains_the_device_before_it_says_that_it_has_stopped():
    session, operators, said = ffn()
    session.transaction()
    session.drain(lambda: operators.calls.append("synchronize") or said.append("synchronized"))
    assert said == ["synchronized", "pull_stopped"]
    with pytest.raises(SessionLost, match="has stopped"):
        session.transaction()


def test_f_keeps_its_windows_while_attention_uses_them_and_after_a_failure():
    session, _, said = ffn(quiet=False)
    with pytest.raises(SessionLost, match="still used by Attention"):
        session.drain(lambda: None)
    session, _, said = ffn("transaction")
    with pytest.raises(RuntimeError, match="failed on the device"):
        session.transaction()
    for call in (session.transaction, lambda: session.drain(lambda: None)):
        with pytest.raises(SessionLost, match="has failed"):
            call()
    assert said == []
