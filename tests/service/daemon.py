"""Real ``ffn_faas serve`` processes over a model that is only a config.json (dummy weights)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
BLOCKING_BACKEND = """
import sys, os, time
from ffn_faas import backends, cli
from ffn_faas.backends.cpu import CpuBackend

class Blocking(CpuBackend):
    def execute_step(self):
        ACTION

backends.BUILT_IN["blocking"] = ("__main__", "Blocking")
sys.exit(cli.main(sys.argv[1:]))
"""


def model_dir(tmp_path):
    """A directory with nothing but a config.json."""
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def free_port(count=1):
    """The first of ``count`` neighbouring free ports."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for offset in range(1, count):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + offset)))
            except OSError:
                continue
            return first


class Daemon:
    """One launch in a session of its own; everything of it is gone when the block ends."""

    def __init__(self, *arguments, ranks=None, program=None, environment=(), module=("ffn_faas",)):
        head = [sys.executable, "-m"]
        if ranks is not None:
            head += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        head += module
        if program is not None:
            head = [sys.executable, "-c", program]
        clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        self.process = subprocess.Popen(
            [*head, "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=clean | dict(environment),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def signal(self, number):
        self.process.send_signal(number)

    def finish(self, timeout=30):
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output


def wait_ready(port, timeout=60):
    """Until /ready is 200; returns its body."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{port}/ready")
            if answer.status_code == 200:
                return answer.json()
        assert time.monotonic() < deadline, f"not ready on {port} within {timeout} s"
        time.sleep(0.05)


def is_listening(port):
    """Whether anything answers on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_gone(port, timeout):
    """Until nothing listens on the port; returns the seconds that took."""
    start = time.monotonic()
    while is_listening(port):
        assert time.monotonic() - start < timeout, f"something still listens on {port} after {timeout} s"
        time.sleep(0.05)
    return time.monotonic() - start


def runs(pid):
    """Whether the process is there and more than a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
