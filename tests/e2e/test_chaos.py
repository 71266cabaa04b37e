"""F is killed and started again under stock vLLM: no request fails and no token changes."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.corpus import prompts
from tests.attention.vllm_nursery import Child, Nursery
from tests.attention.vllm_process import SMALL, attention
from tests.waiting import wait_until

from .demo_process import Demos

TOKENS = 100
PATIENT = {"connector_extra_config": {"reattach_timeout_s": 120}}


@pytest.mark.large
def test_f_killed_and_restarted_under_load_fails_no_request_and_changes_no_token(demos: Demos) -> None:
    figures = demos.figures("--chaos", "--eager", "--prompts", "3", "--max-tokens", "100", "--restarts", "2")
    assert figures["restarts"] == 2
    assert figures["failed_requests"] == 0
    assert figures["tokens_equal"] is True
    assert figures["tokens_compared"] >= 300
    assert figures["requests"] >= 6
    assert figures["longest_gap_s"] > 1, "F was really away"


def test_f_killed_twice_while_vllm_answers_changes_no_token(vllms: Nursery, tmp_path: Path) -> None:
    model = tmp_path / "model"
    layers = make_checkpoint(model).layers
    asked = {"prompts": prompts(3), "tokens": TOKENS}
    settings = {**SMALL, "max_model_len": 256, "max_num_batched_tokens": 256, "model": str(model)}
    (stock,) = vllms.run({**asked, "settings": settings, "env": {"VLLM_PLUGINS": ""}})
    with vllms.f_rank(model) as (f, port):
        held = vllms.start_run({**asked, "settings": {**settings, **attention(port, **PATIENT)}})
        kill_once_it_has_answered(f, port, 50 * layers, held)
    with vllms.f_rank(model, port=port) as (f, _):
        kill_once_it_has_answered(f, port, 50 * layers, held)
    with vllms.f_rank(model, port=port):
        answers = held.result()["answers"]
        assert steps(port) >= 50 * layers
    assert answers == stock["answers"]


def kill_once_it_has_answered(f: Child, port: int, least: int, answered: Child) -> None:
    wait_until(lambda: answered.poll() is not None or steps(port) >= least, 240, every_s=0.02)
    assert answered.poll() is None, "vLLM has to be on its way when F dies"
    f.send_signal(signal.SIGKILL)
    assert f.wait() == -signal.SIGKILL


def steps(port: int) -> int:
    """Steps with posts, since F started; 0 until it serves."""
    try:
        return int(httpx.get(f"http://127.0.0.1:{port}/status").json()["steps"].get("steps", 0))
    except httpx.TransportError:
        return 0
