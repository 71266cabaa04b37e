"""POST /profile: what F asks of Attention, and what it answers when it cannot."""

import json
import threading
import time

import httpx
import pytest

from ffn_faas.protocol import messages
from ffn_faas.service import profiler
from ffn_faas.service.lifecycle import Phase
from ffn_faas.telemetry.spans import StepSpan
from tests import traces
from tests.http.conftest import RecordingConnector, receive
from tests.http.test_attach import attached
from tests.waiting import wait_until


class Keeping(RecordingConnector):
    """Has kept one step once the test says so."""

    can_record = True
    limit = 0
    now = 0

    def record(self, steps):
        self.limit = steps

    def recorded(self):
        return int(self.now > 0)

    def take_spans(self):
        at = self.now
        return [StepSpan(at, at + 100, at + 100, at + 200, at + 900, at + 1000, 1, 4, 1)] if at else []


@pytest.fixture
def keeping(service):
    service.connector = Keeping()
    service.to_ready()
    return service


def order(service, **fields):
    return httpx.post(f"http://127.0.0.1:{service.port}/profile", json=fields, timeout=30)


class Order(threading.Thread):
    """``order`` in a thread."""

    def __init__(self, service, **fields):
        super().__init__()
        self._ask = lambda: order(service, **fields)
        self.start()

    def run(self):
        self._answer = self._ask()

    def answer(self):
        self.join(30)
        return self._answer


def test_posts_of_attention_on_another_clock_stand_beside_the_steps(keeping):
    with attached(keeping, instance="instance") as socket:
        running = Order(keeping, steps=1)
        assert receive(socket, "profile")["posts"] == 1
        keeping.connector.now = time.monotonic_ns()
        assert receive(socket, "profile")["posts"] == 0
        # A's host counts from another moment: its clock shows 7000 where the step began.
        offset = time.time_ns() - time.monotonic_ns() + keeping.connector.now - 7_000
        times = (7_050, 7_060, 7_060, 8_000, 8_100, 0, 1, 4)
        socket.send(messages.Profiled(clock_offset_ns=offset, spans=[times]).model_dump_json())
        answer = running.answer()
    assert answer.status_code == 200
    traces.check(answer.json())
    pids = traces.processes(answer.json())
    (step,) = traces.spans(answer.json(), pids["F rank 0 of 1"], "step")
    (post,) = traces.spans(answer.json(), pids["Attention instance rank 0"], "post")
    assert post["ts"] - step["ts"] == pytest.approx(0.05, abs=50), "as well as two readings of a clock agree, in us"
    assert post["dur"] == pytest.approx(1.05)
    assert keeping.connector.limit == 1


@pytest.mark.parametrize(
    ("offset", "times"),
    [(-(1 << 62), (1, 2, 3, 4, 5, 0, 0, 1)), (1 << 62, (1, 2, 3, 4, 5, 0, 0, 1)), (0, (5, 4, 3, 2, 1, 0, 0, 1))],
)
def test_times_that_no_clock_has_shown_spoil_nothing(keeping, offset, times):
    with attached(keeping) as socket:
        running = Order(keeping, steps=1)
        receive(socket, "profile")
        keeping.connector.now = time.monotonic_ns()
        receive(socket, "profile")
        socket.send(messages.Profiled(clock_offset_ns=offset, spans=[times]).model_dump_json())
        answer = running.answer().json()
    traces.check(answer)
    assert list(traces.processes(answer)) == ["F rank 0 of 1"]
    assert traces.spans(answer, 1, "step")[0]["ts"] == 0.0


def test_an_attention_that_does_not_answer_is_left_out(keeping, monkeypatch):
    monkeypatch.setattr(profiler, "ANSWER_S", 0.2)
    keeping.connector.now = time.monotonic_ns()
    with attached(keeping):
        answer = order(keeping, steps=8, timeout_s=0.2)
    assert answer.status_code == 200
    assert list(traces.processes(answer.json())) == ["F rank 0 of 1"]


def test_who_is_not_to_be_asked_is_not(keeping):
    keeping.connector.now = time.monotonic_ns()
    with attached(keeping) as socket:
        assert order(keeping, steps=8, timeout_s=0.2, attention=False).status_code == 200
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.1)


def test_one_capture_at_a_time(keeping):
    running = Order(keeping, steps=9, timeout_s=1)
    wait_until(lambda: keeping.connector.limit == 9, 5)
    answer = order(keeping)
    assert answer.status_code == 503
    assert "another profile" in answer.json()["reason"]
    assert running.answer().status_code == 200


def test_f_that_is_not_ready_or_cannot_says_so(service):
    service.to(Phase.LOADING)
    assert order(service).json()["reason"].startswith("F is loading")
    service.to(Phase.CAPTURING, Phase.READY)
    answer = order(service)
    assert answer.status_code == 400
    assert "keeps no times of single steps" in answer.json()["reason"]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 5000}, {"timeout_s": 0}, {"timeout_s": 1e9}, {"step": 3}])
def test_an_order_out_of_bounds_is_refused(keeping, wrong):
    assert order(keeping, **wrong).status_code == 422


def test_spans_that_nobody_asked_for_end_the_session(keeping):
    with attached(keeping) as socket:
        socket.send(json.dumps({"type": "profiled", "clock_offset_ns": 0, "spans": []}))
        assert "unexpected message profiled" in receive(socket, "refused")["reason"]
