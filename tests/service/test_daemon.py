"""The daemon as a process: starts, ends, exit codes, what it leaves behind."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from ffn_faas.demo.checkpoint import make_checkpoint
from tests.service.daemon import (
    BLOCKING_BACKEND,
    Daemon,
    free_port,
    is_listening,
    model_dir,
    runs,
    wait_gone,
    wait_ready,
)
from tests.service.player import Player

DEADLOCK = (
    "import ctypes; libc = ctypes.{library}(None); lock = ctypes.create_string_buffer(64); print('stuck', flush=True); "
    "libc.pthread_mutex_lock(lock); libc.pthread_mutex_lock(lock)"
)
"""A native call that no signal interrupts; PyDLL keeps the interpreter lock, CDLL lets go of it."""


@pytest.fixture
def serve(tmp_path):
    """Arguments for one launch over dummy weights."""
    port = free_port(4)
    return port, [model_dir(tmp_path), "--load-format", "dummy", "--port", port, "--exit-record", tmp_path / "records"]


def record(tmp_path, rank=0):
    return json.loads((tmp_path / "records" / f"ffn-rank-{rank}.json").read_text())


@pytest.mark.parametrize("weights", ["dummy", "auto"])
def test_the_native_kernel_serves_without_torch(tmp_path, weights):
    port, model = free_port(4), tmp_path / "checkpoint"
    if weights == "auto":
        pytest.importorskip("torch")
        make_checkpoint(model)
    else:
        model = model_dir(tmp_path)
    flags = ["--load-format", weights, "--moe-kernel", "native"]
    with Daemon(model, *flags, "--port", port) as daemon:
        wait_ready(port)
        assert "libtorch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "POST /stop"])
def test_a_stop_that_is_asked_for_exits_0_and_frees_the_port(serve, tmp_path, way):
    port, arguments = serve
    with Daemon(*arguments) as daemon:
        wait_ready(port)
        if way == "POST /stop":
            assert httpx.post(f"http://127.0.0.1:{port}/stop").status_code == 202
        else:
            daemon.signal(getattr(signal, way))
        code, output = daemon.finish()
    assert code == 0, output
    assert f"stopped: {way}" in output
    assert (record(tmp_path)["exit_code"], record(tmp_path)["reason"]) == (0, way)
    assert not is_listening(port)


def test_a_stop_while_loading_is_a_clean_stop_too(tmp_path):
    config = json.loads((model_dir(tmp_path) / "config.json").read_text())
    config |= {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_hidden_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    port = free_port()
    with Daemon(tmp_path / "model", "--load-format", "dummy", "--port", port) as daemon:
        while not is_listening(port):
            time.sleep(0.02)
        daemon.signal(signal.SIGTERM)
        code, output = daemon.finish()
    assert code == 0, output
    assert "stopped before READY: SIGTERM" in output


def test_a_taken_port_exits_6_before_anything_is_loaded(serve):
    port, arguments = serve
    with socket.create_server(("127.0.0.1", port)), Daemon(*arguments) as daemon:
        code, output = daemon.finish()
    assert code == 6
    assert f"127.0.0.1:{port}" in output
    assert "experts" not in output


def test_a_port_that_is_torchruns_is_named_with_its_remedy(serve, tmp_path):
    port, arguments = serve
    launcher = ["torch.distributed.run", "--nproc-per-node", "1", "--master-port", str(port), "-m", "ffn_faas"]
    with Daemon(*arguments, module=launcher) as daemon:
        code, output = daemon.finish(60)
    assert code != 0
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert "another process has the port" in output
    assert record(tmp_path, 0)["exit_code"] == 6


def test_an_attention_that_is_given_torchruns_port_says_who_did_not_answer(tmp_path):
    from torch.distributed import TCPStore

    from ffn_faas.errors import FfnError

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    player = Player(store.port, model_dir(tmp_path), "misled")
    with pytest.raises(FfnError, match=rf"F rank 0 at 127\.0\.0\.1:{store.port} did not answer within 1 s"):
        player.session.attach(1.0)
    player.close()


@pytest.mark.parametrize(
    ("environment", "extra", "values"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["--data-parallel-size", "3"], ["WORLD_SIZE=2", "--data-parallel-size=3"]),
        ({}, ["--additional-config.afd.num_ffn_ranks", "2"], ["WORLD_SIZE=1", "num_ffn_ranks=2"]),
        ({}, ["--additional-config.afd.role", "attention"], ["'attention'", "'ffn'"]),
        ({"WORLD_SIZE": "9", "RANK": "0", "LOCAL_WORLD_SIZE": "9"}, [], ["9 F ranks", "8 experts"]),
    ],
)
def test_a_launch_that_contradicts_itself_exits_3_within_10_seconds(serve, environment, extra, values):
    _, arguments = serve
    start = time.monotonic()
    with Daemon(*arguments, *extra, environment=environment) as daemon:
        code, output = daemon.finish(timeout=10)
    assert time.monotonic() - start < 10
    assert code == 3, output
    for value in values:
        assert value in output
    assert "Traceback" not in output


def test_a_model_that_does_not_exist_exits_2_and_says_where_it_looked(tmp_path):
    with Daemon(tmp_path / "nowhere", "--port", free_port()) as daemon:
        code, output = daemon.finish()
    assert code == 2
    assert "nowhere" in output
    assert "Traceback" not in output


def test_a_second_signal_forces_the_end(serve):
    port, arguments = serve
    program = BLOCKING_BACKEND.replace("ACTION", "time.sleep(600)")
    with Daemon(*arguments, "--backend", "blocking", program=program) as daemon:
        wait_ready(port)
        daemon.signal(signal.SIGTERM)
        time.sleep(0.3)
        daemon.signal(signal.SIGTERM)
        code, output = daemon.finish(timeout=5)
    assert code == 5
    assert "forced" in output


@pytest.mark.parametrize("way", ["SIGTERM", "POST /stop"])
def test_a_step_that_never_returns_is_ended_non_zero_with_the_reason(serve, tmp_path, way):
    port, arguments = serve
    program = BLOCKING_BACKEND.replace("ACTION", DEADLOCK.format(library="CDLL"))
    with Daemon(*arguments, "--backend", "blocking", "--drain-timeout", "0", program=program) as daemon:
        wait_ready(port)
        start = time.monotonic()
        if way == "SIGTERM":
            daemon.signal(signal.SIGTERM)
        else:
            httpx.post(f"http://127.0.0.1:{port}/stop")
        code, output = daemon.finish(timeout=15)
    assert time.monotonic() - start < 12
    assert code == 5
    assert f"{way}; the end took longer than 8 s and was forced" in output
    assert "in execute_step" in output
    assert record(tmp_path)["exit_code"] == 5


def test_a_step_that_holds_the_interpreter_lock_for_ever_is_ended_too(serve, tmp_path):
    _, arguments = serve
    program = BLOCKING_BACKEND.replace("ACTION", DEADLOCK.format(library="PyDLL"))
    with Daemon(*arguments, "--backend", "blocking", "--drain-timeout", "0", program=program) as daemon:
        for line in daemon.process.stdout:
            if line == "stuck\n":
                break
        time.sleep(0.5)
        daemon.signal(signal.SIGTERM)
        code, output = daemon.finish(timeout=15)
    assert code == 5
    assert "a signal asked for a stop; the end took longer than 9 s and was forced" in output
    assert record(tmp_path)["exit_code"] == 5


def test_an_abort_leaves_a_record(serve, tmp_path):
    _, arguments = serve
    program = BLOCKING_BACKEND.replace("ACTION", "os.abort()")
    with Daemon(*arguments, "--backend", "blocking", program=program) as daemon:
        code, _ = daemon.finish(timeout=60)
    assert code == -signal.SIGABRT
    assert record(tmp_path)["reason"] == "a fatal signal: number 06"


def test_losing_a_rank_ends_the_rest_with_4_within_5_seconds_and_names_it(serve, tmp_path):
    port, arguments = serve
    with Daemon(*arguments, ranks=3) as daemon:
        for rank in range(3):
            wait_ready(port + rank)
        os.kill(record(tmp_path, 1)["pid"], signal.SIGKILL)
        for rank in range(3):
            wait_gone(port + rank, timeout=5)
        code, output = daemon.finish()
    assert code != 0
    for rank in (0, 2):
        assert record(tmp_path, rank)["exit_code"] == 4
        assert "F rank 1" in record(tmp_path, rank)["reason"]
    assert f"F rank 1 (127.0.0.1:{port + 1}) was lost" in output


def test_killing_the_launcher_leaves_no_worker_after_10_seconds(serve, tmp_path):
    port, arguments = serve
    with Daemon(*arguments, ranks=2) as daemon:
        wait_ready(port)
        wait_ready(port + 1)
        daemon.signal(signal.SIGKILL)
        for rank in range(2):
            wait_gone(port + rank, timeout=10)
            pid = record(tmp_path, rank)["pid"]
            deadline = time.monotonic() + 10
            while runs(pid):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_torchruns_agent_store_variable_does_not_matter(serve):
    port, arguments = serve
    with Daemon(*arguments, ranks=2, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}) as daemon:
        assert wait_ready(port)["ranks"] == {"0": "ready", "1": "ready"}
        daemon.signal(signal.SIGTERM)
        code, output = daemon.finish()
    assert code == -signal.SIGTERM or code in (0, 1), output
    assert output.count("stopped: SIGTERM") == 2, output
