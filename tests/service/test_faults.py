"""Whoever dies, and wherever it stands, the others know in time, go on or end with the reason, and nothing is left.

Victims: Attention, F rank 0, F rank 1, the launcher. Real processes; experts are exact in numpy, so every answer is
checked. F stands still at gates (gated_f), so each cell is the same at every run. Reaction times are promises of
docs/operations.md (1 s, 2 s, 5 s, 10 s); a loaded machine is given SLACK of them here, and fault_table.py prints what
was seen. SIGSTOP: test_fault_stops.py.
"""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.service.faults import (
    A_STEP,
    ATTENTION_KNOWS_S,
    F_GATE,
    ORPHANS_S,
    SESSION_ENDS_S,
    SLACK,
    WORLD_ENDS_S,
    AttentionProcess,
    attached_player,
    bystander,
    cells,
    gated_world,
    in_phase,
    stand,
)
from tests.service.player import Player
from tests.waiting import wait_until


@pytest.mark.parametrize(("over", "phase"), cells(over_tcp=["mid-dispatch", "mid-compute"]))
def test_attention_is_killed(shared, over, phase, record_property):
    world = shared.at(phase, over)
    ready = phase not in F_GATE
    with contextlib.ExitStack() as stack:
        if ready:
            other = stack.enter_context(bystander(world)) if phase != "draining" else None
            if phase in ("mid-compute", "draining"):
                world.close("compute")
            elif phase == "mid-combine":
                world.close("answered")
        victim = stack.enter_context(AttentionProcess(world, phase, A_STEP[phase]))
        victim.wait()
        stand(world, phase)
        if phase == "draining":
            world.client.post(f"http://127.0.0.1:{world.port}/stop")
            world.wait_phase("draining")
        assert phase in world.sessions(0)
        victim.process.kill()
        seconds = wait_until(
            lambda: not any(phase in world.sessions(rank) for rank in (0, 1)), SESSION_ENDS_S * SLACK, "the session"
        )
        record_property("fault", ["A", over, phase, "SIGKILL", f"session ended in {seconds:.2f} s"])
        if ready:
            world.open_all()
        if phase == "draining":
            assert [process.wait(ORPHANS_S * SLACK) for process in world.processes] == [0, 0], world.log()
            world.require_nothing_left()
            return
        if ready:
            other.step()
            again = Player(world.port, world.model, phase).join()
            again.step()
            again.close()
    if ready:
        for rank in (0, 1):
            wait_until(lambda rank=rank: world.get("/status", rank).json()["window_bytes"] == 0)
    assert [world.phase(rank) for rank in (0, 1)] == [F_GATE.get(phase, "ready")] * 2


@pytest.mark.parametrize(("over", "phase"), cells(over_tcp=["mid-combine"]))
@pytest.mark.parametrize("victim", [0, 1])
def test_an_f_rank_is_killed(tmp_path, victim, over, phase, record_property):
    place = F_GATE.get(phase)
    with gated_world(tmp_path, over, closed=[place] if place else []) as world:
        arrive = in_phase(world, phase, victim)
        player, thread, raised = attached_player(world, phase)
        arrive()
        survivor = 1 - victim
        world.processes[victim].kill()
        killed = time.monotonic()
        knows = wait_until(lambda: player.is_over, ATTENTION_KNOWS_S * SLACK, "Attention")
        if thread is not None:
            thread.join(ATTENTION_KNOWS_S * SLACK)
            assert not thread.is_alive()
            assert raised, "an answer without that rank cannot be right"
        if phase == "draining":
            reason = f"F rank {victim}"
            wait_until(lambda: reason in world.get("/ready", survivor).json()["reason"], what="noticing the loss")
            world.open_all()
        code = world.processes[survivor].wait(WORLD_ENDS_S * SLACK)
        ended = time.monotonic() - killed
        record_property(
            "fault",
            [
                f"F rank {victim}",
                over,
                phase,
                "SIGKILL",
                f"A knew in {knows:.2f} s, the other rank ended in {ended:.2f} s",
            ],
        )
        assert code == 4, world.log()
        assert f"F rank {victim}" in world.record(survivor)["reason"]
        world.processes[victim].wait()
        world.require_nothing_left()
        player.close()


@pytest.mark.parametrize(("over", "phase"), cells())
def test_the_launcher_is_killed(tmp_path, over, phase, record_property):
    place = F_GATE.get(phase)
    with gated_world(tmp_path, over, torchrun=True, closed=[place] if place else []) as world:
        arrive = in_phase(world, phase, victim=1)
        player, thread, _ = attached_player(world, phase)
        arrive()
        world.processes[0].kill()
        killed = time.monotonic()
        if phase in ("draining", "mid-combine"):
            world.open_all()  # elsewhere the step, or the load, never ends by itself
        for rank in (0, 1):
            world.wait_ended(rank, ORPHANS_S * SLACK)
        seconds = time.monotonic() - killed
        codes = [world.record(rank)["exit_code"] for rank in (0, 1)]
        record_property(
            "fault", ["torchrun", over, phase, "SIGKILL", f"no worker after {seconds:.2f} s, exit codes {codes}"]
        )
        wait_until(lambda: player.is_over, ATTENTION_KNOWS_S * SLACK, "Attention")
        if thread is not None:
            thread.join(ATTENTION_KNOWS_S * SLACK)
            assert not thread.is_alive()
        reasons = [world.record(rank)["reason"] for rank in (0, 1)]
        assert any("launcher" in reason or "/stop" in reason for reason in reasons), reasons
        world.processes[0].wait()
        world.require_nothing_left()
        player.close()
