"""The API server of a stock vLLM dies, or is stopped, wherever F stands; its engine is a process of its own.

tests/e2e/test_deaths.py kills it, and its worker, under load in CI; all of the matrix runs with --large.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from ffn_faas.demo.checkpoint import make_checkpoint
from tests.service.daemon import free_port
from tests.service.faults import F_GATE, PHASES, gated_world
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.large, pytest.mark.timeout(900)]
pytest.importorskip("vllm")
ENGINE_NOTICES_S = 60
"""vLLM's own: how its engine learns of the server's death while it loads a model is not ours."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server") / "tiny"
    make_checkpoint(directory)
    return directory


class Server:
    """A stock vLLM API server in front of ``world``, without weights of its own."""

    def __init__(self, world, directory):
        self.port = free_port()
        afd = {"role": "attention", "port": world.port, "connector_extra_config": {"answer_timeout_s": 200}}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(world.model)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--max-model-len", "128", "--max-num-seqs", "2", "--load-format", "ffn_faas"]
        command += ["--model-loader-extra-config", json.dumps({"dummy": True})]
        command += ["--additional-config", json.dumps({"afd": afd})]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
        with (directory / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | settings, start_new_session=True
            )
        self._directory = directory

    def wait_serving(self):
        def serves():
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=1).status_code == 200
            return False

        wait_until(serves, 240, "the server")

    def ask(self):
        """One completion; returns its status, None when the server is gone."""
        body = {"model": "m", "prompt": "The sea", "max_tokens": 4, "temperature": 0}
        try:
            return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60).status_code
        except httpx.TransportError:
            return None

    def family(self):
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]

    def log(self):
        return (self._directory / "server.log").read_text()[-4000:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()  # a vLLM that is killed outright leaves its own shared memory behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def stand(world, server, phase):
    """Bring vLLM and F to where the cell needs them; returns the thread of a request, or None."""
    if phase in F_GATE:
        world.wait_at(F_GATE[phase])
        wait_until(lambda: world.sessions(0), 120, f"vLLM's attach: {server.log()}")
        return None
    world.wait_phase("ready")
    server.wait_serving()
    if phase == "idle":
        return None
    place = "answered" if phase == "mid-combine" else "compute"
    if phase != "mid-dispatch":
        world.close(place, 0)
    asked = threading.Thread(target=server.ask)
    asked.start()
    if phase == "mid-dispatch":  # posts follow each other without a pause: any moment is in or beside one
        time.sleep(0.2)
        return asked
    world.wait_at(place, 0)
    if phase == "draining":
        world.client.post(f"http://127.0.0.1:{world.port}/stop")
        world.wait_phase("draining")
    return asked


CELLS = [pytest.param(over, phase, id=f"{over}-{phase}") for over in ("shm", "tcp") for phase in PHASES]


@pytest.mark.parametrize(("over", "phase"), CELLS)
def test_the_api_server_is_killed(tmp_path, model, over, phase, record_property):
    closed = [F_GATE[phase]] if phase in F_GATE else []
    with (
        gated_world(tmp_path, over, 1, closed=closed, model=model, dtype="bfloat16") as world,
        Server(world, tmp_path) as server,
    ):
        asked = stand(world, server, phase)
        family = server.family()
        server.process.kill()
        killed = time.monotonic()
        world.open_all()  # a worker that waits for F does so however its server fares
        wait_until(lambda: not world.sessions(0), ENGINE_NOTICES_S, "the session")
        ended = time.monotonic() - killed
        server.process.wait()
        wait_until(lambda: not any(map(psutil.pid_exists, family)), ENGINE_NOTICES_S, "the engine's end")
        seen = f"session ended in {ended:.2f} s, no process after {time.monotonic() - killed:.2f} s"
        record_property("fault", ["A API server", over, phase, "SIGKILL", seen])
        if asked is not None:
            asked.join(60)
        if phase == "draining":
            assert world.processes[0].wait(30) == 0, world.log()
            return
        assert world.phase(0) in (F_GATE.get(phase, "ready"), "ready")


@pytest.mark.parametrize(("over", "phase"), [cell for cell in CELLS if cell.values[1] in ("idle", "mid-compute")])
def test_a_stopped_api_server_goes_on(tmp_path, model, over, phase, record_property):
    with (
        gated_world(tmp_path, over, 1, model=model, dtype="bfloat16") as world,
        Server(world, tmp_path) as server,
    ):
        asked = stand(world, server, phase)
        server.process.send_signal(signal.SIGSTOP)
        world.open_all()
        time.sleep(1)
        assert world.get("/live").status_code == 200
        assert len(world.sessions(0)) == 1
        server.process.send_signal(signal.SIGCONT)
        if asked is not None:
            asked.join(60)
        assert server.ask() == 200
        record_property("fault", ["A API server", over, phase, "SIGSTOP", "its session lives; served after SIGCONT"])
