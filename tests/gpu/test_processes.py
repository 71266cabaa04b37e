"""The daemon on one GPU, unrelated Attention processes on another: windows over CUDA IPC, deaths, another attach."""

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
from tests.gpu.conftest import DEVICES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")]
PORT = 8311


def start(*arguments, **options):
    return subprocess.Popen([sys.executable, "-u", *arguments], text=True, stdout=subprocess.PIPE, **options)


def status():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2) as answer:
            return answer.status
    except (urllib.error.URLError, OSError):
        return 0


@dataclass
class Daemon:
    """F on GPU 0; ``restart`` after it was killed."""

    model: Path
    flags: list[str]
    process: subprocess.Popen | None = None

    def start(self):
        flags = ["--load-format", "dummy", "--backend", "gpu-deepep-m2n", "--device-ids", "0", "--port", str(PORT)]
        self.process = start("-m", "ffn_faas", "serve", str(self.model), *flags, *self.flags)
        deadline = time.monotonic() + 60
        while status() != 200:
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["graph", "eager"])
def daemon(tmp_path, request):
    model = TinyModel(hidden=256, inter=128, experts=8, top_k=2, layers=3)
    (tmp_path / "config.json").write_text(json.dumps(model.config()))
    made = Daemon(tmp_path, ["--enforce-eager"] if request.param == "eager" else [])
    made.start()
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(timeout=30) == 0


def attention(daemon, instance, rows, *more):
    arguments = str(daemon.model), f"127.0.0.1:{PORT}", "1", instance, str(rows), *more
    return start("-m", "tests.gpu.attention_process", *arguments, stderr=subprocess.PIPE)


def rounds(process, count):
    for _ in range(count):
        line = process.stdout.readline()
        if not line.startswith("ok "):
            process.kill()
            raise AssertionError(line + process.stdout.read() + process.stderr.read())


def test_attention_processes_come_die_and_come_again_while_others_are_served(daemon):
    steady = attention(daemon, "steady", 64)
    rounds(steady, 20)
    for turn in range(4):
        mortal = attention(daemon, f"mortal-{turn}", 300)
        rounds(mortal, 5 + 3 * turn)
        os.kill(mortal.pid, signal.SIGKILL)
        mortal.wait()
        rounds(steady, 20)
    stopped = attention(daemon, "stopped", 16)
    rounds(stopped, 3)
    os.kill(stopped.pid, signal.SIGSTOP)
    rounds(steady, 20)
    stopped.kill()
    stopped.wait()
    rounds(steady, 20)
    assert status() == 200
    steady.kill()
    steady.wait()


def test_twenty_deaths_of_each_kind_leave_f_serving_others(daemon):
    """The deaths: while idle, while a kernel waits, while posts are written."""
    steady = attention(daemon, "steady", 64)
    rounds(steady, 10)
    arguments = str(daemon.model), f"127.0.0.1:{PORT}", "1", "20"
    mortals = start("-m", "tests.gpu.mortals", *arguments, stderr=subprocess.PIPE)
    for kind in ("idle", "wait", "put"):
        line = mortals.stdout.readline()
        assert line == f"killed {kind} 20\n", line + mortals.stderr.read()
        rounds(steady, 20)
    assert mortals.wait(timeout=30) == 0
    fresh = attention(daemon, "fresh", 64)
    rounds(fresh, 10)
    for process in (steady, fresh):
        process.kill()
        process.wait()


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_f_killed_and_restarted_three_times_changes_no_result(daemon, way):
    """Every result is compared with float64; rows go in two chunks, so that a chunk of a batch may be pending."""
    steady = attention(daemon, "steady", 64, way, "60")
    rounds(steady, 10)
    for turn in range(3):
        daemon.kill()
        daemon.start()
        rounds(steady, 10 + 5 * turn)
    steady.kill()
    steady.wait()


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_f_killed_for_good_ends_attention_with_the_reason_and_no_result(daemon, way):
    lost = attention(daemon, "lost", 64, way)
    rounds(lost, 10)
    daemon.kill()
    out, log = lost.communicate(timeout=60)
    assert lost.returncode != 0
    assert "is lost" in log
    assert "error" not in out
    daemon.start()
