"""The daemon on one GPU, unrelated Attention processes on another: windows over CUDA IPC, deaths, another attach."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

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


@pytest.fixture(params=["graph", "eager"])
def daemon(tmp_path, request):
    model = TinyModel(hidden=256, inter=128, experts=8, top_k=2, layers=3)
    (tmp_path / "config.json").write_text(json.dumps(model.config()))
    flags = ["--load-format", "dummy", "--backend", "gpu-deepep-m2n", "--device-ids", "0", "--port", str(PORT)]
    flags += ["--enforce-eager"] if request.param == "eager" else []
    process = start("-m", "ffn_faas", "serve", str(tmp_path), *flags)
    deadline = time.monotonic() + 60
    while status() != 200:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield tmp_path
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def attention(model, instance, rows):
    return start("-m", "tests.gpu.attention_process", str(model), f"127.0.0.1:{PORT}", "1", instance, str(rows))


def rounds(process, count):
    for _ in range(count):
        assert process.stdout.readline().startswith("ok "), process.stdout.read()


def test_attention_processes_come_die_and_come_again_while_others_are_served(daemon):
    model = daemon
    steady = attention(model, "steady", 64)
    rounds(steady, 20)
    for turn in range(4):
        mortal = attention(model, f"mortal-{turn}", 300)
        rounds(mortal, 5 + 3 * turn)
        os.kill(mortal.pid, signal.SIGKILL)
        mortal.wait()
        rounds(steady, 20)
    stopped = attention(model, "stopped", 16)
    rounds(stopped, 3)
    os.kill(stopped.pid, signal.SIGSTOP)
    rounds(steady, 20)
    stopped.kill()
    stopped.wait()
    rounds(steady, 20)
    assert status() == 200
    steady.kill()
    steady.wait()
