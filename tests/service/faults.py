"""Victims of the fault matrix, the worlds that they belong to, and how each is brought to where it is to die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading

import pytest

from tests.service.gated_world import ROOT, GatedWorld
from tests.service.player import Player

SLACK = 4
SESSION_ENDS_S, ATTENTION_KNOWS_S, WORLD_ENDS_S, ORPHANS_S = 1, 2, 5, 10
PHASES = ("handshake", "loading", "warm-up", "idle", "mid-dispatch", "mid-compute", "mid-combine", "draining")
F_GATE = {"handshake": "starting", "loading": "loading", "warm-up": "capturing"}
"""The gate that F stands at, which bears the name of its own phase; in the others F is ready or draining."""
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


def cells(over_tcp=(), seldom=()):
    """(how rows travel, phase): all over shared memory but ``seldom``, ``over_tcp`` over TCP; the rest with --large."""
    return [
        pytest.param(
            over, phase, id=f"{over}-{phase}", marks=() if phase in often else (pytest.mark.slow, pytest.mark.large)
        )
        for over, often in (("shm", set(PHASES) - set(seldom)), ("tcp", set(over_tcp)))
        for phase in PHASES
    ]


def gated_world(directory, over, ranks=2, **options):
    """Gated F ranks whose rows travel ``over`` shm or tcp."""
    return GatedWorld(directory, ranks, flags=["--connector", over], **options)


class AttentionProcess:
    """A player in a process of its own, killed when the block ends."""

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
        """Until it says ``word``, by default the step that it goes to."""
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
    """One world of two F ranks for the cells in which Attention is the victim, while it only has to move forward."""

    def __init__(self, directory):
        self._directory, self._count, self._over, self.world = directory, 0, "", None

    def at(self, phase, over):
        """The world, standing in the F phase that this cell needs."""
        place = F_GATE.get(phase)
        ended = self.world is not None and any(process.poll() is not None for process in self.world.processes)
        if ended or over != self._over:
            self.end()
            self._over = over
        if self.world is None or (place and not all(self.world.is_at(place, rank) for rank in (0, 1))):
            gates = list(F_GATE.values())
            passed = gates.index(place) if place else len(gates)
            if self.world is None or not all((self.world.gates / f"{place}-{rank}").exists() for rank in (0, 1)):
                self.end()
                self._count += 1
                self.world = gated_world(self._directory / str(self._count), over, closed=gates[passed:])
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


def stand(world, phase):
    """Bring a dispatched post to where the cell needs it."""
    if phase in ("mid-compute", "draining"):
        world.wait_at("compute")
    elif phase == "mid-combine":
        world.wait_at("answered")


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
    """Gates of the victim and of the others, as the cell needs them; call before ``attached_player``.

    Returns what waits, once there is a post, until all of F stands where the cell needs it.
    """
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
