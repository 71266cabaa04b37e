"""What is known to go wrong at the end of a service, or while it idles, each with the process that it happens to."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time

import pytest

from ffn_faas.attention.session import LossPolicy
from tests.service.gated_world import GatedWorld
from tests.service.player import Player
from tests.waiting import wait_until


def test_a_teardown_that_never_returns_is_ended_inside_the_budget_with_the_reason(tmp_path):
    with GatedWorld(tmp_path, ranks=1, closed=["release"], flags=["--drain-timeout", "0"]) as world:
        world.wait_phase("ready")
        world.processes[0].terminate()
        began = time.monotonic()
        assert world.processes[0].wait(30) == 5
        assert time.monotonic() - began < 20
        assert "the end took longer than 8 s and was forced" in world.log()
        assert "in release" in world.log()
        assert world.record(0)["exit_code"] == 5


@pytest.mark.parametrize("way", ["asked for", "a rank was lost"])
def test_a_teardown_that_fails_does_not_hide_how_the_rank_ended(tmp_path, way):
    with GatedWorld(tmp_path, ranks=2, closed=["broken-release"]) as world:
        world.wait_phase("ready")
        if way == "asked for":
            world.client.post(f"http://127.0.0.1:{world.port}/stop")
        else:
            world.processes[1].kill()
        assert world.processes[0].wait(30) == (0 if way == "asked for" else 4)
        assert "the device is gone" in world.log()
        assert world.record(0)["exit_code"] == world.processes[0].returncode


def test_an_error_that_nobody_foresaw_ends_the_world_with_its_text_everywhere(tmp_path):
    with GatedWorld(tmp_path, ranks=2) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "unlucky").join()
        world.close("broken-compute", 1)
        with pytest.raises(RuntimeError, match="F rank 1"):
            player.step()
        assert [process.wait(30) for process in world.processes] == [4, 1], world.log()
        assert "RuntimeError: the expert kernel failed with code 7" in world.record(1)["reason"]
        assert "code 7" in world.record(0)["reason"]
        player.close()


def test_idle_for_longer_than_every_timeout_is_alive_and_the_next_step_works(tmp_path):
    flags = ["--stall-timeout", "0.2", "--drain-timeout", "0.2", "--world-timeout", "20"]
    with GatedWorld(tmp_path, ranks=2, flags=flags) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "idle", LossPolicy(0.0, 0.2)).join()
        player.step()
        time.sleep(1.5)
        assert [world.get("/live", rank).status_code for rank in (0, 1)] == [200, 200]
        assert world.get("/status").json()["steps"]["idle_s"] > 1.0
        assert not player.is_over
        player.step()
        player.close()


def test_a_step_is_stuck_after_the_stall_timeout_counted_from_its_item_and_well_again_when_it_ends(tmp_path):
    with GatedWorld(tmp_path, ranks=1, flags=["--stall-timeout", "0.3"]) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "slow").join()
        time.sleep(0.5)
        assert world.get("/live").status_code == 200
        world.close("compute")
        player.dispatched()
        wait_until(lambda: world.get("/live").status_code == 503)
        assert "--stall-timeout" in world.get("/live").json()["reason"]
        world.open_all()
        player.answered()
        wait_until(lambda: world.get("/live").status_code == 200)
        player.close()


def test_a_compile_that_holds_the_interpreter_lock_ends_no_session_and_no_world(tmp_path):
    with GatedWorld(tmp_path, ranks=2, closed=["compiling"]) as world:
        player = Player(world.port, world.model, "patient")
        player.join()
        player.step()
        pings = [link._socket.ping_interval for link in player.session.links]
        assert pings == [None, None], "a ping that is not answered in time would end the session"
        player.close()


def test_a_slow_end_under_torchrun_is_over_before_torchrun_kills(tmp_path):
    with GatedWorld(tmp_path, ranks=1, torchrun=True, flags=["--drain-timeout", "2"]) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "slow").join()
        world.close("compute")
        player.dispatched()
        world.wait_at("compute")
        began = time.monotonic()
        world.processes[0].terminate()
        seconds = world.wait_ended(0, 30)
        assert seconds < 25, "torchrun kills after 30 s, and then nobody says why"
        assert world.record(0)["exit_code"] == 5
        assert "SIGTERM; the end took longer than 10 s and was forced" in world.record(0)["reason"]
        assert time.monotonic() - began < 30
        world.processes[0].wait(30)
        player.close()


@pytest.mark.parametrize("way", ["a loss", "a forced end"])
def test_torchelastics_error_file_says_why_however_the_rank_ended(tmp_path, way):
    errors = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(errors)}
    closed = ["release"] if way == "a forced end" else []
    flags = ["--drain-timeout", "0"]
    with GatedWorld(tmp_path / "world", ranks=2, closed=closed, flags=flags, environment=environment) as world:
        world.wait_phase("ready")
        world.processes[1].kill()
        assert world.processes[0].wait(30) == 4
        assert "F rank 1" in json.loads(errors.read_text())["message"]["message"]


def test_a_drain_that_torchrun_would_cut_is_warned_about(tmp_path):
    with GatedWorld(tmp_path, ranks=1, flags=["--drain-timeout", "30"]) as world:
        world.wait_phase("ready")
        assert "torchrun kills workers 30 s after SIGTERM" in world.log()


def test_every_rank_of_an_instance_attaches_again_after_a_kill_in_the_middle_of_a_step(tmp_path):
    policy = LossPolicy(reattach_timeout_s=120.0, answer_timeout_s=600.0)
    with GatedWorld(tmp_path, ranks=1) as world:
        world.wait_phase("ready")
        players = [Player(world.port, world.model, "pair", policy, rank, 2).join() for rank in (0, 1)]
        for player in players:
            player.step()
        world.close("compute")
        players[0].dispatched()
        world.wait_at("compute")
        answer = threading.Thread(target=players[0].answered)
        answer.start()
        world.open("compute")
        world.close("compute")  # a step under way passed; the next one stands
        world.kill_and_start_again()
        world.open_all()
        answer.join(120)
        assert not answer.is_alive()
        for player in players:
            player.step()
            assert player.session.reattached == 1
        assert len(world.get("/status").json()["sessions"]) == 1
        players[0].close()
        players[1].step()
        assert not players[1].is_over, "an orderly detach is no error to a sibling"
        players[1].close()


def test_an_orderly_end_is_no_error_in_the_log_of_a_sibling(tmp_path, caplog):
    with GatedWorld(tmp_path, ranks=1) as world:
        world.wait_phase("ready")
        players = [Player(world.port, world.model, "pair", None, rank, 2).join() for rank in (0, 1)]
        with caplog.at_level(logging.WARNING):
            players[0].close()
            time.sleep(0.2)
            players[1].close()
        assert caplog.records == []
        world.processes[0].send_signal(signal.SIGINT)
        assert world.processes[0].wait(30) == 0


@pytest.mark.slow
def test_torchrun_restarts_a_world_that_lost_a_rank_and_a_waiting_attention_finishes(tmp_path):
    policy = LossPolicy(reattach_timeout_s=120.0, answer_timeout_s=600.0)
    with GatedWorld(tmp_path, ranks=2, torchrun=True, max_restarts=1) as world:
        world.wait_phase("ready")
        player = Player(world.port, world.model, "waiting", policy).join()
        world.close("compute", 1)
        player.dispatched()
        world.wait_at("compute", 1)
        before = [world.pid(rank) for rank in (0, 1)]
        os.kill(before[1], signal.SIGKILL)
        world.open("compute", 1)
        player.answered()
        player.step()
        assert player.session.reattached == 1
        assert not {world.pid(rank) for rank in (0, 1)} & set(before)
        player.close()
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        assert world.processes[0].wait(60) == 0, world.log()
