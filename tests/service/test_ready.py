"""/ready is 200 neither early nor late: a poller and an Attention that waits, with real F processes."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.service.gated_world import GatedWorld
from tests.service.player import Player

POLL_S = 0.02
ANSWERED_S = 0.1
SLACK = 20
"""Of the promise of 100 ms: a loaded machine may take longer, an F that is not ready takes for ever."""


class Poller:
    """Asks /ready every 20 ms: ``seen`` has (when asked, when answered, status, phase)."""

    def __init__(self, port):
        self.seen = []
        self.is_ready = threading.Event()
        self._url = f"http://127.0.0.1:{port}/ready"
        self._stop = False
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self):
        with httpx.Client() as client:
            while not self._stop:
                asked = time.monotonic()
                try:
                    answer = client.get(self._url)
                except httpx.TransportError:
                    time.sleep(POLL_S)
                    continue
                self.seen.append((asked, time.monotonic(), answer.status_code, answer.json()["phase"]))
                if answer.status_code == 200:
                    self.is_ready.set()
                time.sleep(POLL_S)

    def stop(self):
        self._stop = True
        self._thread.join(10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_200_is_followed_by_an_answered_post_and_no_answer_comes_before_it(tmp_path, ranks, record_property):
    with GatedWorld(tmp_path, ranks=ranks, closed=["capturing"]) as world:
        poller = Poller(world.port)
        player = Player(world.port, world.model, "waiting")
        player.granted()
        player.declared()
        world.wait_at("capturing")
        answered = threading.Event()
        times = []

        def play():
            player.attached()
            player.step()
            times.append(time.monotonic())
            answered.set()

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        assert not answered.wait(0.3)
        assert not poller.is_ready.is_set()
        world.open_all()
        assert poller.is_ready.wait(30)
        assert answered.wait(ANSWERED_S * SLACK)
        time.sleep(3 * POLL_S)
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        assert [process.wait(30) for process in world.processes] == [0] * ranks, world.log()
        poller.stop()
        player.close()
    first = next(index for index, entry in enumerate(poller.seen) if entry[2] == 200)
    assert {entry[3] for entry in poller.seen[:first]} <= {"starting", "loading", "capturing", "ready"}
    after = [status for *_, status, _ in poller.seen[first:]]
    assert after == sorted(after), "once 200, it stays so until the stop"
    seconds = times[0] - poller.seen[first][1]
    record_property(
        "fault", ["/ready", f"{ranks} F rank(s)", "first 200", f"a post was answered {seconds:+.3f} s later"]
    )
    late = poller.seen[first][0] - times[0]
    assert late < ANSWERED_S * SLACK, "served, and not ready"


def test_it_is_503_from_the_moment_a_stop_is_asked_for(tmp_path):
    with GatedWorld(tmp_path, ranks=1) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "busy").join()
        world.close("compute")
        player.dispatched()
        world.wait_at("compute")
        assert world.get("/ready").status_code == 200
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        answer = world.get("/ready")
        assert (answer.status_code, answer.json()["phase"], answer.json()["reason"]) == (503, "draining", "POST /stop")
        assert world.get("/live").status_code == 200
        world.open_all()
        player.answered()
        assert world.processes[0].wait(30) == 0
        player.close()


def test_it_is_503_everywhere_once_a_rank_is_lost(tmp_path):
    with GatedWorld(tmp_path, ranks=2) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "busy").join()
        world.close("compute", 0)
        player.dispatched()
        world.wait_at("compute", 0)
        world.processes[1].kill()
        deadline = time.monotonic() + 4
        while (answer := world.get("/ready")).status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert "F rank 1" in answer.json()["reason"]
        assert world.processes[0].wait(30) == 4
        player.close()
