"""The rendered local overlay as processes, with real F and stock vLLM: gating, a killed F pod, finished requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ffn_faas.demo import http_client
from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.ports import free_ports

from .pod_runner import Runner, running
from .rendered import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
TOKENS = 400


@contextmanager
def local(tmp_path: Path) -> Iterator[Runner]:
    model = tmp_path / "model"
    make_checkpoint(model, "qwen3_moe", None)
    values = [f"MODEL={model}", f"TORCHRUN_PORT={free_ports()}"]
    arguments = [str(ROOT / "overlays" / "local"), *(word for value in values for word in ("--set", value))]
    with running("local", arguments, tmp_path / "logs", {"HF_HUB_OFFLINE": "1"}) as runner:
        yield runner


def kill_pod(root: int, worker_index: str) -> int:
    """SIGKILL every process of an F pod, launcher and workers; how many there were."""
    killed = 0
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):
            if process.environ().get("LWS_WORKER_INDEX") == worker_index:
                process.kill()
                killed += 1
    return killed


def test_attention_starts_after_f_and_requests_survive_a_killed_f_pod(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("vllm")
    with local(tmp_path) as pods:
        started = pods.at("attention-0", "attention started")
        for pod in ("ffn-0", "ffn-0-1"):
            _, state = http_client.request(8100, "GET", "/status", host=pods.address(pod), timeout_s=60)
            assert state["phase"] == "ready"
            assert started > pods.at(pod, "ffn started") + state["time_to_ready_s"]
        assert started > pods.at("attention-0", "wait-for-ffn ended with exit code 0")
        pods.at("attention-0", "Ready")

        def ask(prompt: str) -> tuple[int, int]:
            body = {"model": "model", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
            host = pods.address("attention-0")
            status, answer = http_client.request(8000, "POST", "/v1/completions", body, 400, host=host)
            return status, answer["usage"]["completion_tokens"] if status == 200 else answer

        with ThreadPoolExecutor(3) as executor:
            asked = [executor.submit(ask, prompt) for prompt in ("the", "a river", "one two")]
            time.sleep(0.5)
            assert not any(answer.done() for answer in asked), "they have to be on their way when F dies"
            assert kill_pod(pods.process.pid, "1") >= 2
            answers = [answer.result() for answer in asked]
        assert answers == [(200, TOKENS)] * 3
        recreated = pods.at("ffn-0", "group recreated")
        for pod in ("ffn-0", "ffn-0-1"):
            assert pods.at(pod, "ffn started", 2) >= recreated
            pods.at(pod, "Ready", 2)
        assert pods.finish() == 0
        assert len(pods.times("attention-0", "attention started")) == 1, "Attention never restarted"
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
