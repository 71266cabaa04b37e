"""Who is stopped (SIGSTOP), wherever it stands, keeps no one else from going on and goes on itself when continued."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from ffn_faas.attention.session import LossPolicy
from tests.service.faults import (
    A_STEP,
    F_GATE,
    PHASES,
    AttentionProcess,
    bystander,
    cells,
    gated_world,
    in_phase,
    stand,
)
from tests.service.player import Player
from tests.waiting import wait_until

ANSWER_TIMEOUT_S = 0.5
STOPPED_S = 1.0
"""How long a stop lasts that nobody has to notice."""


def seldom(*often):
    return [phase for phase in PHASES if phase not in often]


def answered_or_lost(player):
    """A post of which one F rank has gone when another answers."""
    with contextlib.suppress(RuntimeError):
        player.answered()


def answering(player, phase):
    """The thread, not yet started, in which ``player`` waits for its answers."""
    return threading.Thread(target=answered_or_lost if phase == "draining" else Player.answered, args=[player])


def require_over(answer, timeout_s):
    """``answer`` ends in time, if it was started."""
    if answer.ident is not None:
        answer.join(timeout_s)
        assert not answer.is_alive()


def require_clean_end(world):
    world.client.post(f"http://127.0.0.1:{world.port}/stop")
    assert [process.wait(30) for process in world.processes] == [0] * len(world.processes), world.log()
    world.require_nothing_left()


@pytest.mark.parametrize(("over", "phase"), cells(seldom=seldom("idle", "mid-compute", "mid-combine")))
def test_a_stopped_attention_harms_no_one_and_goes_on(shared, over, phase, record_property):
    world = shared.at(phase, over)
    ready = phase not in F_GATE
    place = {"mid-compute": "compute", "mid-combine": "answered", "draining": "compute"}.get(phase)
    with AttentionProcess(world, phase, A_STEP[phase]) as victim:
        if ready:
            with bystander(world):
                pass
        if place:
            world.close(place)
        victim.wait()
        stand(world, phase)
        if phase == "draining":
            world.client.post(f"http://127.0.0.1:{world.port}/stop")
            world.wait_phase("draining")
        victim.process.send_signal(signal.SIGSTOP)
        world.open_all()
        if phase == "draining":
            assert [process.wait(30) for process in world.processes] == [0, 0], world.log()
            world.require_nothing_left()
            record_property("fault", ["A", over, phase, "SIGSTOP", "F drained and ended with exit code 0"])
            return
        world.wait_phase("ready")
        with bystander(world) as other:
            for _ in range(20):
                other.step()
        assert world.get("/live").status_code == 200
        assert phase in world.sessions(0)
        seen = "others served; goes on after SIGCONT"
        if (over, phase) == ("tcp", "mid-dispatch"):
            seen = "others served"  # half of a post's head is on its way, and nobody knows the other half
        else:
            victim.process.send_signal(signal.SIGCONT)
            victim.go_on()
            victim.wait("answered")
        record_property("fault", ["A", over, phase, "SIGSTOP", seen])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("over", "phase"), cells(seldom=seldom("mid-dispatch", "mid-compute")))
def test_a_stopped_f_rank_is_waited_for_and_serves_when_it_goes_on(tmp_path, victim, over, phase, record_property):
    place = F_GATE.get(phase)
    with gated_world(tmp_path, over, closed=[place] if place else []) as world:
        arrive = in_phase(world, phase, victim)
        # Of a world that goes away nobody waits for the next one here: what is answered before it goes is not promised.
        patience_s = 0.0 if phase == "draining" else 60.0
        policy = LossPolicy(reattach_timeout_s=patience_s, answer_timeout_s=ANSWER_TIMEOUT_S if patience_s else 600.0)
        player = Player(world.port, world.model, "watcher", policy)
        if phase in F_GATE:
            player.granted()
            player.declared()
        else:
            player.join()
        answer = answering(player, phase)
        if phase in ("mid-compute", "mid-combine", "draining"):
            player.dispatched()
            answer.start()
        arrive()
        world.processes[victim].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        if phase == "mid-dispatch":
            player.dispatched()
            answer.start()
        world.open_all()
        seen = "waited for"
        if phase in ("mid-dispatch", "mid-compute"):
            wait_until(lambda: player.is_over, what="Attention")
            seen = f"A knew in {time.monotonic() - stopped:.2f} s (answer_timeout_s {ANSWER_TIMEOUT_S})"
        else:
            time.sleep(STOPPED_S)
        world.processes[victim].send_signal(signal.SIGCONT)
        if phase in F_GATE:
            player.attached()
        require_over(answer, 60)
        if phase != "draining":
            player.step()
        player.close()
        if phase == "draining":
            assert [process.wait(30) for process in world.processes] == [0, 0], world.log()
            world.require_nothing_left()
        else:
            require_clean_end(world)
        seen += "; both ended with exit code 0 after SIGCONT" if phase == "draining" else "; served after SIGCONT"
        record_property("fault", [f"F rank {victim}", over, phase, "SIGSTOP", seen])


@pytest.mark.parametrize(("over", "phase"), cells(seldom=seldom("idle")))
def test_a_stopped_launcher_stops_no_one(tmp_path, over, phase, record_property):
    place = F_GATE.get(phase)
    with gated_world(tmp_path, over, torchrun=True, closed=[place] if place else []) as world:
        arrive = in_phase(world, phase, victim=1)
        player = Player(world.port, world.model, "watcher")
        player.granted()
        player.declared()
        if phase not in F_GATE:
            player.attached()
            if phase not in ("idle", "mid-dispatch"):
                player.dispatched()
        answer = answering(player, phase)
        if phase in ("mid-compute", "mid-combine", "draining"):
            answer.start()
        arrive()
        world.processes[0].send_signal(signal.SIGSTOP)
        world.open_all()
        if phase in F_GATE:
            player.attached()
        require_over(answer, 30)
        if phase == "draining":
            for rank in (0, 1):
                world.wait_ended(rank, 30)
        else:
            player.step()
        player.close()
        world.processes[0].send_signal(signal.SIGCONT)
        if phase == "draining":
            assert world.processes[0].wait(30) == 0, world.log()
            world.require_nothing_left()
        else:
            require_clean_end(world)
        record_property("fault", ["torchrun", over, phase, "SIGSTOP", "served; a stop is clean after SIGCONT"])
