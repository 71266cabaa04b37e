"""What a CAM system does when one of it fails: nobody waits for ever, nothing is freed under a pending receive."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")

from ffn_faas import native
from ffn_faas.errors import HandshakeRefused, SessionLost, UsageError
from tests.cam.model import TinyModel
from tests.cam.world import ARank, f_world, together

pytestmark = pytest.mark.skipif(native.optional_library("cam_twin") is None, reason="built without the twin")
MODEL = TinyModel(layers=2)
ATTENTION = """
import sys, time
from tests.cam.world import ARank
import torch

class World:
    def __init__(self, port, model, directory):
        self.port, self.model, self.directory, self.attention, self.extra = port, model, directory, 1, {}
        self.ops = "cpu-twin"

from tests.cam.world import FWorld
World.block = FWorld.block
rank = ARank(World(int(sys.argv[1]), sys.argv[2], sys.argv[3]), 0)
rank.join()
rank.client._lethal = True
print("JOINED", flush=True)
while True:
    row, ids = torch.ones(1, 64, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.int32)
    rank.client.dispatch(0, row, ids, torch.ones(1, 3))
    rank.client.combine()
    time.sleep(float(sys.argv[4]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("model"), "W4A8_DYNAMIC")


def attention_process(world, pause_s: float) -> subprocess.Popen[str]:
    arguments = [str(world.port), str(world.model), str(world.directory), str(pause_s)]
    process = subprocess.Popen(
        [sys.executable, "-c", ATTENTION, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "JOINED\n", process.communicate()[1]
    return process


def test_a_killed_attention_ends_f_non_zero_with_everything_kept(model, tmp_path):
    with f_world(model, tmp_path, 1, 1) as world:
        process = attention_process(world, 30.0)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        code, output = world.daemons[0].finish(30)
        assert code == 4, output[-3000:]
        assert "A rank 0 is gone: its connection closed" in output
        assert "weights, graph and communicator are kept until the process is gone" in output
        assert "exit 4 without teardown" in output


def test_a_killed_f_ends_an_attention_whose_exchange_is_in_flight_within_seconds(model, tmp_path):
    with f_world(model, tmp_path, 1, 1, "--enforce-eager") as world:
        process = attention_process(world, 0.0)
        world.daemons[0].process.kill()
        began = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 20
        assert process.returncode in (1, 4), errors[-3000:]
        assert "is lost" in errors


def test_who_may_not_attach_is_refused_by_name_and_the_pair_goes_on(model, tmp_path):
    with f_world(model, tmp_path, 1, 1, "--enforce-eager") as world:
        first = ARank(world, 0)
        together([first], ARank.join)
        second = ARank(world, 0, instance="another")
        with pytest.raises(HandshakeRefused, match="npu-async-cam pairs with one Attention when both start"):
            second.session.attach(10)
        world.extra = {"reattach_timeout_s": 60}
        with pytest.raises(UsageError, match="reattach_timeout_s means nothing to connector cam"):
            ARank(world, 0)
        first.check(MODEL, _reference(model), rounds=1)
        first.session.close()
        assert world.daemons[0].finish(60)[0] == 0


def test_a_stop_while_f_still_waits_for_attention_is_a_clean_one(model, tmp_path):
    with f_world(model, tmp_path, 1, 1) as world:
        _until_pairing(world)
        assert world.get("/ready").status_code == 503
        world.daemons[0].signal(signal.SIGTERM)
        code, output = world.daemons[0].finish(30)
        assert code == 0, output[-3000:]


def test_pull_is_refused_at_the_start_since_nothing_can_drive_it(model, tmp_path):
    with f_world(model, tmp_path, 1, 1, ffn_mega_moe=True) as world:
        code, output = world.daemons[0].finish(30)
        assert code == 2
        assert "ffn_mega_moe: the schemas of its operators are not public" in output


def _reference(model):
    from tests.cam.model import Reference

    return Reference(model)


def _until_pairing(world) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if world.get("/status").json()["phase"] == "pairing":
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_stop_with_a_receive_that_stays_pending_is_forced_and_says_why(model, tmp_path):
    with f_world(model, tmp_path, 1, 1, "--enforce-eager") as world:
        process = attention_process(world, 30.0)
        process.send_signal(signal.SIGSTOP)
        world.daemons[0].signal(signal.SIGTERM)
        code, output = world.daemons[0].finish(30)
        process.kill()
        process.communicate()
        assert code == 5, output[-3000:]
        assert "a receive is still pending after 5 s and cannot be cancelled" in output
        assert "exit 5 without teardown" in output


def test_an_attention_that_fails_in_the_warm_up_ends_f_although_its_receive_is_pending(model, tmp_path):
    def broken(layer):
        raise RuntimeError("no such kernel")

    with f_world(model, tmp_path, 1, 1) as world:
        rank = ARank(world, 0)
        rank.session.attach(60)
        rank.client._one_row = broken
        rank.session.declare_layers(list(rank.model.spec.layers))
        with pytest.raises(SessionLost, match="no such kernel"):
            rank.session.wait_ready(60)
        code, output = world.daemons[0].finish(30)
        assert code == 4, output[-3000:]
        assert "A rank 0 failed while it paired with F: RuntimeError: no such kernel" in output
        assert "exit 4 without teardown" in output
