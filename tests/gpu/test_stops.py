"""Who is stopped (SIGSTOP), Attention or F, keeps no one else from going on, and goes on itself when continued."""

import signal
import time

import pytest

from tests.gpu.test_processes import WRONG, Daemon, attention, both_ways, daemon, model, status  # noqa: F401 - fixtures

pytestmark = pytest.mark.gpu


def test_whoever_is_stopped_delays_only_itself_and_no_result_changes(daemon):  # noqa: F811 - the fixture
    """Every result is compared with float64. What F has in flight ends by itself; then nothing is answered any more."""
    running = both_ways(daemon, "60")
    for one in running:
        one.rounds(10)
    for stopped, other in (running, running[::-1]):
        stopped.signal(signal.SIGSTOP)
        other.rounds(30)
        assert status() == 200
        stopped.signal(signal.SIGCONT)
        stopped.rounds(10)
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    done = [one.done for one in running]
    time.sleep(1.0)
    assert [one.done for one in running] == done
    daemon.process.send_signal(signal.SIGCONT)
    for one in running:
        one.rounds(20)
        assert "F is back" not in one.log, "nobody has to attach again"
        one.kill()


def test_an_f_stopped_for_longer_than_an_answer_may_take_is_attached_to_again_or_ends_attention(model):  # noqa: F811
    served = Daemon(model, [])
    served.start()
    patient = both_ways(served, "60", "1")
    hasty = attention(served, "hasty", 16, "graph", "0", "1")
    for one in (*patient, hasty):
        one.rounds(10)
    served.process.send_signal(signal.SIGSTOP)
    assert hasty.wait() != 0
    assert "has not answered a post for" in hasty.log
    assert WRONG not in hasty.log
    time.sleep(1.0)
    served.process.send_signal(signal.SIGCONT)
    for one in patient:
        one.rounds(20)
        assert "has not answered a post for" in one.log
        assert "F is back after" in one.log
        one.kill()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=30) == 0
