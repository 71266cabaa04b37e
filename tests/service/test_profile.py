"""A profile of two real F ranks and an Attention process, by the command and by the flag."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ffn_faas.backends.cpu import CpuBackend
from ffn_faas.cli import main
from ffn_faas.config import ServeConfig, World
from ffn_faas.errors import UsageError
from ffn_faas.service import host
from ffn_faas.service.lifecycle import Lifecycle
from ffn_faas.service.stop import StopRequest
from tests import traces
from tests.service.daemon import CONFIG, Daemon, free_port, model_dir, wait_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]
STEPS = 100
EARLY = 1000
"""Enough that Attention, which F asks within some tens of milliseconds of its attach, is still posting then."""


def test_both_sides_of_every_layer_are_seen_on_one_clock(tmp_path, capsys):
    model, port = model_dir(tmp_path), free_port(2)
    with ExitStack() as stack:
        for rank in range(2):
            place = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
            stack.enter_context(
                Daemon(
                    model, "--load-format", "dummy", "--port", port, "--profile", tmp_path / "first",
                    "--profile-steps", EARLY, environment={name: str(value) for name, value in place.items()},
                )
            )  # fmt: skip
        wait_ready(port)
        load = {"model": str(model), "port": port, "dummy": True, "rounds": 10**6}
        attention = subprocess.Popen(
            [sys.executable, "-m", "tests.attention.attention_process", json.dumps(load)],
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )
        stack.callback(attention.wait)
        stack.callback(attention.kill)
        target = tmp_path / "trace.json"
        while not all((tmp_path / "first" / f"ffn-rank-{rank}.trace.json").exists() for rank in range(2)):
            assert attention.poll() is None
            time.sleep(0.05)
        assert main(["profile", f"127.0.0.1:{port}", "--steps", str(STEPS), "--output", str(target)]) == 0
    assert f"{2 * STEPS} steps of 2 F rank(s)" in capsys.readouterr().out
    captured = json.loads(target.read_text())
    traces.check(captured)
    pids = traces.processes(captured)
    (name,) = (name for name in pids if name.startswith("Attention"))
    assert set(pids) == {"F rank 0 of 2", "F rank 1 of 2", name}
    _every_step_lies_inside_a_post(captured, pids, name)
    layers = {step["args"]["layer"] for step in traces.spans(captured, pids["F rank 1 of 2"], "step")}
    assert layers == set(range(CONFIG["num_hidden_layers"]))
    for rank in range(2):
        early = json.loads((tmp_path / "first" / f"ffn-rank-{rank}.trace.json").read_text())
        traces.check(early)
        assert len(traces.spans(early, pids[f"F rank {rank} of 2"], "step")) == EARLY
        assert any(name.startswith("Attention") for name in traces.processes(early)) == (rank == 0)


def _every_step_lies_inside_a_post(captured, pids, name):
    """One A rank posts one batch after the other: F works on it after it began to dispatch and before it had all."""
    posts = traces.spans(captured, pids[name], "post")
    answered = [sum_["ts"] for sum_ in traces.spans(captured, pids[name], "post part") if sum_["name"] == "sum"]
    assert len(answered) == len(posts) >= STEPS // 2
    begin, end = posts[0]["ts"], answered[-1]
    seen = 0
    for rank in range(2):
        parts = traces.spans(captured, pids[f"F rank {rank} of 2"], "step part")
        for experts in (part for part in parts if part["name"] == "experts"):
            if not begin <= experts["ts"] <= end:
                continue
            seen += 1
            inside = [
                post["ts"] <= experts["ts"] and experts["ts"] + experts["dur"] <= done + traces.ROUNDING_US
                for post, done in zip(posts, answered, strict=True)
            ]
            assert sum(inside) == 1, experts
    assert seen >= STEPS


def test_a_backend_that_keeps_no_times_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(CpuBackend, "can_record", False)
    config = ServeConfig(model=str(model_dir(tmp_path)), world=World(), load_format="dummy", profile_dir="here")
    with pytest.raises(UsageError, match="--profile: backend cpu keeps no times"):
        host._parse(config, Lifecycle(), StopRequest())


def test_who_does_not_answer_is_named(tmp_path, capsys):
    port = free_port()
    assert main(["profile", f"127.0.0.1:{port}", "--output", str(tmp_path / "t.json")]) == 6
    assert f"127.0.0.1:{port} does not answer" in capsys.readouterr().err
    assert main(["profile", "--steps", "0"]) == 2
    assert main(["profile", "ftp://there"]) == 2
