"""A recipe, and the overlay whose pods share nothing, run for real: F under torchrun, a stand-in for stock vLLM."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ffn_faas.demo import http_client
from tests.data import TinyModel
from tests.service.daemon import free_port

from .pod_runner import Runner, running
from .rendered import ROOT, Overlay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROUNDS = 4


def stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which vLLM's command line starts the stand-in."""
    place = tmp_path / "stand_in" / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("stand_in_vllm.py"), place / "api_server.py")
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stand_in"), str(Path(__file__).parents[2])])}


@contextmanager
def launched(tmp_path: Path, **recipe: str) -> Iterator[tuple[Runner, int]]:
    """A launcher, and Attention's port."""
    first = free_port(3)
    values = {"MODEL": str(tmp_path / "model"), "LAYOUT": "1A1F", "FFN_PORT": first, "ATTENTION_PORT": first + 1}
    values |= {"TORCHRUN_PORT": first + 2, "STARTUP_S": 120, "REATTACH_TIMEOUT_S": 100, **recipe}
    (tmp_path / "tiny.env").write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    environment = stand_in(tmp_path) | {"FFN_FAAS_TOKEN": "of-both-sides"}
    with running("launch", [str(tmp_path / "tiny.env")], tmp_path / "logs", environment) as runner:
        yield runner, first + 1


def processes(tmp_path: Path, word: str = "") -> list[psutil.Process]:
    """What runs now and was started for this test, by a word of its command line."""
    lines = ((process, " ".join(process.info["cmdline"] or [])) for process in psutil.process_iter(["cmdline"]))
    return [process for process, line in lines if str(tmp_path) in line and word in line]


def completions(port: int, host: str = "127.0.0.1") -> list[str]:
    status, digests = http_client.request(port, "POST", "/v1/completions", {"rounds": ROUNDS}, 120, host=host)
    assert status == 200
    return digests


def test_a_recipe_runs_gated_survives_dead_pods_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "model")
    with launched(tmp_path) as (runner, port):
        started = runner.at("attention-0", "attention started")
        assert started > runner.at("attention-0", "wait-for-ffn ended with exit code 0")
        runner.at("attention-0", "Ready")
        before = completions(port)
        assert len(set(before)) == ROUNDS

        for process in processes(tmp_path, "ffn_faas serve"):
            process.kill()
        with ThreadPoolExecutor(1) as executor:
            pending = executor.submit(completions, port)
            runner.at("ffn-0", "ffn ended with signal SIGKILL")
            runner.at("ffn-0", "Ready", 2)
            assert pending.result() == before, "asked while F was away"

        for process in processes(tmp_path, "api_server"):
            process.kill()
        runner.at("attention-0", "attention ended with signal SIGKILL")
        runner.at("attention-0", "Ready", 2)
        assert completions(port) == before
        assert len(runner.times("ffn-0", "ffn started")) == 2, "F never noticed"

        assert runner.finish(signal.SIGINT) == 0
        assert runner.times("attention-0", "attention ended with exit code 0")
    assert processes(tmp_path) == []


def test_pods_that_share_nothing_meet_at_the_data_port_that_their_policy_opens(tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "model")
    overlay = Overlay("cpu-apart")
    *_, opened = overlay.kind("NetworkPolicy", "ffn")["spec"]["ingress"]
    arguments = [str(ROOT / "overlays" / "cpu-apart"), "--set", f"MODEL={tmp_path / 'model'}"]
    arguments += ["--set", f"TORCHRUN_PORT={free_port()}"]
    with running("local", arguments, tmp_path / "logs", stand_in(tmp_path)) as runner:
        runner.at("attention-0", "Ready")
        assert len(set(completions(8000, runner.address("attention-0")))) == ROUNDS
        (attention,) = processes(tmp_path, "api_server")
        peers = {(c.raddr.ip, c.raddr.port) for c in attention.net_connections() if c.status == "ESTABLISHED"}
        data = {(runner.address(pod), opened["ports"][0]["port"]) for pod in ("ffn-0", "ffn-0-1")}
        assert {peer for peer in peers if peer[1] != 8100} == data
        assert runner.finish() == 0
    assert processes(tmp_path) == []
