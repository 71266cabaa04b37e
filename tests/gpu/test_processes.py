"""The daemon and unrelated Attention processes: windows over CUDA IPC, deaths, another attach.

F is on one GPU and Attention on another; where there is only one they share it, and processes take turns.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data import TinyModel
from tests.gpu.attentions import Attention
from tests.gpu.conftest import A_GPU, SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.processes]
PORT = int(os.environ.get("GPU_TEST_PORT", "8311"))
WRONG = "rows are zeros"
"""What an Attention process ends with when a result is not the expected one."""


def start(*arguments, **options):
    return subprocess.Popen([sys.executable, "-u", *arguments], text=True, stdout=subprocess.PIPE, **options)


def serve(model, *flags, device="0", port=PORT, **options):
    fixed = ["--load-format", "dummy", "--backend", "gpu-deepep-m2n", "--device-ids", device, "--port", str(port)]
    return start("-m", "ffn_faas", "serve", str(model), *fixed, *flags, **options)


def status(port=PORT):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return answer.status
    except (urllib.error.URLError, OSError):
        return 0


def wait_until_ready(*processes, port=PORT):
    deadline = time.monotonic() + 60
    while status(port) != 200:
        assert [process.poll() for process in processes] == [None] * len(processes)
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class Daemon:
    """F on GPU 0; ``restart`` after it was killed."""

    model: Path
    flags: list[str]
    process: subprocess.Popen | None = None

    def start(self):
        self.process = serve(self.model, *self.flags, *SHARED)
        wait_until_ready(self.process)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def model(tmp_path):
    tiny = TinyModel(hidden=256, inter=128, experts=8, top_k=2, layers=3)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    return tmp_path


@pytest.fixture(params=["graph", "eager"])
def daemon(model, request):
    made = Daemon(model, ["--enforce-eager"] if request.param == "eager" else [])
    made.start()
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(timeout=30) == 0


def attention(daemon, instance, rows, *more):
    return attention_on(A_GPU, daemon.model, instance, rows, *more)


def attention_on(gpu, model, instance, rows, *more):
    return Attention(str(model), f"127.0.0.1:{PORT}", gpu, instance, str(rows), *more)


def test_attention_processes_come_die_and_come_again_while_others_are_served(daemon):
    steady = attention(daemon, "steady", 64)
    steady.rounds(20)
    for turn in range(2):
        mortal = attention(daemon, f"mortal-{turn}", 300)
        mortal.rounds(5 + 3 * turn)
        mortal.kill()
        steady.rounds(20)
    assert status() == 200
    steady.kill()


@pytest.mark.deaths
def test_twenty_deaths_of_each_kind_leave_f_serving_others(daemon):
    """The deaths: while idle, while a kernel waits, while posts are written. Five of each where F runs eager."""
    count = "5" if daemon.flags else "20"
    steady = attention(daemon, "steady", 64)
    steady.rounds(10)
    arguments = str(daemon.model), f"127.0.0.1:{PORT}", A_GPU, count
    mortals = start("-m", "tests.gpu.mortals", *arguments, stderr=subprocess.PIPE)
    for kind in ("idle", "wait", "put"):
        line = mortals.stdout.readline()
        assert line == f"killed {kind} {count}\n", line + mortals.stderr.read()
        steady.rounds(20)
    assert mortals.wait(timeout=30) == 0
    fresh = attention(daemon, "fresh", 64)
    fresh.rounds(10)
    for process in (steady, fresh):
        process.kill()


def both_ways(daemon, *more):
    """One Attention that launches its kernels, one that replays a graph; rows go in two chunks."""
    return [attention(daemon, way, rows, way, *more) for way, rows in (("eager", 64), ("graph", 40))]


def test_f_killed_and_restarted_three_times_changes_no_result(daemon):
    """Every result is compared with float64; rows go in chunks, so that a chunk of a batch may be pending."""
    running = both_ways(daemon, "60")
    for one in running:
        one.rounds(10)
    for turn in range(3):
        daemon.kill()
        daemon.start()
        for one in running:
            one.rounds(10 + 5 * turn)
    for one in running:
        one.kill()


def test_f_killed_for_good_ends_attention_with_the_reason_and_no_result(daemon):
    running = both_ways(daemon)
    for one in running:
        one.rounds(10)
    daemon.kill()
    for one in running:
        assert one.wait() != 0
        assert "is lost" in one.log
        assert WRONG not in one.log
    daemon.start()


class World:
    """F ranks on the GPUs named, all from one command line as torchrun starts them."""

    def __init__(self, model, devices, *flags):
        self.model, self.devices, self.flags, self.ranks = model, devices, flags, []

    def start(self, **masks):
        size = str(self.devices.count(",") + 1)
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", **masks}
        self.ranks = [
            serve(
                self.model,
                *self.flags,
                device=self.devices,
                env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.STDOUT,
            )
            for rank in range(int(size))
        ]
        return self

    def end(self):
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        return [(rank.communicate(timeout=40)[0], rank.returncode)[1] for rank in self.ranks]


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        ("0,0", []),
        pytest.param("0,1", [], marks=pytest.mark.skipif(A_GPU == "0", reason="needs two GPUs: a rank on each")),
        (f"0,{A_GPU}", ["--enforce-eager"]),
    ],
    ids=["one GPU", "two", "eager"],
)
def test_two_f_ranks_serve_one_attention_and_come_back_after_one_of_them_was_killed(model, devices, flags):
    """Processes that share a GPU take turns: rank 1 is on Attention's own. Every result is compared with float64."""
    world = World(model, devices, "--share-device", *flags).start()
    wait_until_ready(*world.ranks)
    captured = attention(world, "captured", 40, "graph", "60")
    eager = attention(world, "eager", 64, "eager", "60")
    for one in (captured, eager):
        one.rounds(10)
    world.ranks[1].kill()
    log, _ = world.ranks[0].communicate(timeout=20)
    assert world.ranks[0].returncode == 4, log
    world.start()
    wait_until_ready(*world.ranks)
    for one in (captured, eager):
        one.rounds(10)
        one.kill()
    assert world.end() == [0, 0]


@pytest.mark.quiet
def test_one_gpu_for_two_ranks_or_for_both_sides_is_refused_by_its_uuid_unless_sharing_was_asked_for(model):
    world = World(model, "0,1").start(CUDA_VISIBLE_DEVICES="0")  # each rank sees one GPU, and it is the same
    ends = [(rank.communicate(timeout=60)[0], rank.returncode) for rank in world.ranks]
    assert any("already serves another F rank of this host" in log and code == 6 for log, code in ends), ends
    assert all(code in (4, 6) for _, code in ends), ends
    daemon = serve(model)
    wait_until_ready(daemon)
    second = serve(model, port=PORT + 5, stderr=subprocess.STDOUT)
    log, _ = second.communicate(timeout=60)
    assert second.returncode == 6, log
    assert "already serves another F rank of this host" in log
    refused = attention_on("0", model, "beside", 8)
    assert refused.wait() != 0
    assert "Attention and F are on one GPU" in refused.log
    assert "--share-device" in refused.log
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=30) == 0
    daemon = serve(model, "--share-device")
    wait_until_ready(daemon)
    beside = attention_on("0", model, "beside", 8)
    beside.rounds(5)
    beside.kill()
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=30) == 0
