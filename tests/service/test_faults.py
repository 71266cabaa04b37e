"""Whoever dies, and wherever it stands, the others know in time, go on or end with the reason, and nothing is left.

Victims: Attention, F rank 0, F rank 1, the launcher. Real processes; experts are exact in numpy, so every answer is
checked. F stands still at gates (gated_f), so each cell is the same at every run. Reaction times are promises of
docs/operations.md (1 s, 2 s, 5 s, 10 s); a loaded machine is given SLACK of them here, and fault_table.py prints what
was seen.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from ffn_faas.attention.session import LossPolicy
from tests.service.gated_world import ROOT, GatedWorld, wait_until
from tests.service.player import Player

SLACK = 4
SESSION_ENDS_S, ATTENTION_KNOWS_S, WORLD_ENDS_S, ORPHANS_S = 1, 2, 5, 10
PHASES = ("handshake", "loading", "warm-up", "idle", "mid-dispatch", "mid-compute", "mid-combine", "draining")
F_GATE = {"handshake": "starting", "loading": "loading", "warm-up": "capturing"}
F_PHASE = {"handshake": "starting", "loading": "loading", "warm-up": "capturing"}
A_STEP = {
    "handshake": "granted",
    "loading": "declared",
    "warm-up": "declared",
    "idle": "attached",
    "mid-dispatch": "half",
    "mid-compute": "dispatched",
    "mid-combine": "dispatched",
    "draining": "dispatched",
}


class AttentionProcess:
    """A player in a process of its own."""

    def __init__(self, world, instance, until):
        arguments = {"port": world.port, "model": str(world.model), "instance": instance, "until": until}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.player", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self._until = until

    def wait(self, word=None):
        word = word or self._until
        while (line := self.process.stdout.readline().strip()) != word:
            assert line, f"the player ended before it was {word}"

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class SharedWorld:
    """One world of two F ranks for all cells in which Attention is the victim; it only moves forward."""

    def __init__(self, directory):
        self._directory, self._count, self.world = directory, 0, None

    def at(self, phase):
        """The world, standing in the F phase that this cell needs."""
        place = F_GATE.get(phase)
        if self.world is not None and any(process.poll() is not None for process in self.world.processes):
            self.end()
        if self.world is None or (place and not all(self.world.is_at(place, rank) for rank in (0, 1))):
            gates = list(F_GATE.values())
            passed = gates.index(place) if place else len(gates)
            if self.world is None or not all((self.world.gates / f"{place}-{rank}").exists() for rank in (0, 1)):
                self.end()
                self._count += 1
                self.world = GatedWorld(self._directory / str(self._count), closed=gates[passed:])
            for earlier in gates[:passed]:
                self.world.open(earlier)
        if place:
            self.world.wait_at(place)
        else:
            self.world.open_all()
            self.world.wait_phase("ready")
        return self.world

    def end(self):
        if self.world is not None:
            self.world.__exit__()
            self.world = None


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = SharedWorld(tmp_path_factory.mktemp("faults"))
    yield made
    made.end()


@contextlib.contextmanager
def bystander(world):
    """Another Attention on the same F, which nothing may disturb."""
    player = Player(world.port, world.model, "bystander").join()
    try:
        player.step()
        yield player
        player.step()
    finally:
        player.close()


def stand(world, phase, player):
    """Bring a dispatched post to where the cell needs it."""
    if phase in ("mid-compute", "draining"):
        world.wait_at("compute")
    elif phase == "mid-combine":
        world.wait_at("answered")


@pytest.mark.parametrize("phase", PHASES)
def test_attention_is_killed(shared, phase, record_property):
    world = shared.at(phase)
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
        stand(world, phase, victim)
        if phase == "draining":
            world.client.post(f"http://127.0.0.1:{world.port}/stop")
            world.wait_phase("draining")
        assert phase in world.sessions(0)
        victim.process.kill()
        seconds = wait_until(
            lambda: not any(phase in world.sessions(rank) for rank in (0, 1)), SESSION_ENDS_S * SLACK, "the session"
        )
        record_property("fault", ["A", phase, "SIGKILL", f"session ended in {seconds:.2f} s"])
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
    assert [world.phase(rank) for rank in (0, 1)] == [F_PHASE.get(phase, "ready")] * 2


@pytest.mark.parametrize("phase", ["idle", "mid-compute", "mid-combine"])
def test_a_stopped_attention_harms_no_one_and_goes_on(shared, phase, record_property):
    world = shared.at(phase)
    with bystander(world) as other, AttentionProcess(world, phase, A_STEP[phase]) as victim:
        place = {"mid-compute": "compute", "mid-combine": "answered"}.get(phase)
        if place:
            world.close(place)
        victim.wait()
        stand(world, phase, victim)
        victim.process.send_signal(signal.SIGSTOP)
        world.open_all()
        for _ in range(20):
            other.step()
        assert world.get("/live").status_code == 200
        assert phase in world.sessions(0)
        victim.process.send_signal(signal.SIGCONT)
        victim.go_on()
        victim.wait("answered")
        record_property("fault", ["A", phase, "SIGSTOP", "others served; goes on after SIGCONT"])


def attached_player(world, phase):
    """An Attention as far as it can come in this phase, in this process, and the thread of its post."""
    player = Player(world.port, world.model, "watcher")
    raised: list[BaseException] = []

    def combine():
        try:
            player.answered()
        except RuntimeError as error:
            raised.append(error)

    player.granted()
    player.declared()
    thread = None
    if phase not in F_GATE:
        player.attached()
        if phase == "mid-dispatch":
            player.half()
        elif phase != "idle":
            player.dispatched()
            thread = threading.Thread(target=combine, daemon=True)
            thread.start()
    return player, thread, raised


def in_phase(world, phase, victim):
    """Gates of the victim and of the others, as the cell needs them; call before ``attached_player``."""
    others = [rank for rank in range(world.ranks) if rank != victim]
    if phase in F_GATE:
        world.wait_at(F_GATE[phase])
        return lambda: None
    world.open_all()
    world.wait_phase("ready")
    if phase == "mid-compute":
        world.close("compute", victim)
    elif phase == "mid-combine":
        world.close("answered", victim)
        for rank in others:
            world.close("compute", rank)
    elif phase == "draining":
        world.close("compute")

    def arrive():
        if phase == "mid-compute":
            world.wait_at("compute", victim)
        elif phase == "mid-combine":
            world.wait_at("answered", victim)
            for rank in others:
                world.wait_at("compute", rank)
        elif phase == "draining":
            world.wait_at("compute")
            world.client.post(f"http://127.0.0.1:{world.port}/stop")
            world.wait_phase("draining")

    return arrive


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, 1])
def test_an_f_rank_is_killed(tmp_path, victim, phase, record_property):
    place = F_GATE.get(phase)
    with GatedWorld(tmp_path, closed=[place] if place else []) as world:
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
            [f"F rank {victim}", phase, "SIGKILL", f"A knew in {knows:.2f} s, the other rank ended in {ended:.2f} s"],
        )
        assert code == 4, world.log()
        assert f"F rank {victim}" in world.record(survivor)["reason"]
        world.processes[victim].wait()
        world.require_nothing_left()
        player.close()


@pytest.mark.parametrize("phase", ["idle", "mid-compute"])
def test_a_stopped_f_rank_is_found_by_its_answer_and_served_again_when_it_goes_on(tmp_path, phase, record_property):
    with GatedWorld(tmp_path) as world:
        world.wait_phase("ready")
        policy = LossPolicy(reattach_timeout_s=60.0, answer_timeout_s=0.5)
        player = Player(world.port, world.model, "watcher", policy).join()
        player.step()
        if phase == "mid-compute":
            world.close("compute", 1)
            player.dispatched()
            world.wait_at("compute", 1)
        world.processes[1].send_signal(signal.SIGSTOP)
        if phase == "idle":
            player.dispatched()
        began = time.monotonic()
        answer = threading.Thread(target=player.answered)
        answer.start()
        wait_until(lambda: player.is_over, what="Attention")
        record_property(
            "fault",
            ["F rank 1", phase, "SIGSTOP", f"A knew in {time.monotonic() - began:.2f} s (answer_timeout_s 0.5)"],
        )
        world.open_all()
        world.processes[1].send_signal(signal.SIGCONT)
        answer.join(60)
        assert not answer.is_alive()
        player.step()
        assert player.session.reattached >= 1
        player.close()
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        assert [process.wait(30) for process in world.processes] == [0, 0], world.log()


SELDOM = [
    pytest.param(phase, marks=pytest.mark.slow) for phase in ("handshake", "warm-up", "mid-dispatch", "mid-combine")
]


@pytest.mark.parametrize("phase", ["loading", "idle", "mid-compute", "draining", *SELDOM])
def test_the_launcher_is_killed(tmp_path, phase, record_property):
    place = F_GATE.get(phase)
    with GatedWorld(tmp_path, torchrun=True, closed=[place] if place else []) as world:
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
        record_property("fault", ["torchrun", phase, "SIGKILL", f"no worker after {seconds:.2f} s, exit codes {codes}"])
        wait_until(lambda: player.is_over, ATTENTION_KNOWS_S * SLACK, "Attention")
        if thread is not None:
            thread.join(ATTENTION_KNOWS_S * SLACK)
            assert not thread.is_alive()
        reasons = [world.record(rank)["reason"] for rank in (0, 1)]
        assert any("launcher" in reason or "/stop" in reason for reason in reasons), reasons
        world.processes[0].wait()
        world.require_nothing_left()
        player.close()


def test_a_stopped_launcher_stops_no_one(tmp_path, record_property):
    with GatedWorld(tmp_path, torchrun=True) as world:
        world.wait_phase("ready")
        world.processes[0].send_signal(signal.SIGSTOP)
        player = Player(world.port, world.model, "watcher").join()
        player.step()
        player.close()
        world.processes[0].send_signal(signal.SIGCONT)
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        assert world.processes[0].wait(30) == 0, world.log()
        record_property("fault", ["torchrun", "idle", "SIGSTOP", "served; a stop is clean after SIGCONT"])
        world.require_nothing_left()
