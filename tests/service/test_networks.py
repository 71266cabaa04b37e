"""F and Attention in network namespaces joined by a veth pair: two hosts as far as the network can tell."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.daemon import model_dir

ROOT = Path(__file__).parents[2]
F_ADDRESS, A_ADDRESS = "10.231.77.1", "10.231.77.2"
TOKEN = "of-the-networks-test"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_networks() -> bool:
    name = f"ffn-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0 or not can_make_networks(), reason="network namespaces need root"),
]


class Network:
    """Namespaces ``f`` and ``a``, and the link between them."""

    def __init__(self) -> None:
        self.f, self.a = f"ffn-f-{os.getpid()}", f"ffn-a-{os.getpid()}"
        self._ends = (f"ff{os.getpid()}", f"fa{os.getpid()}")
        for name in (self.f, self.a):
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            self._ends[0],
            "netns",
            self.f,
            "type",
            "veth",
            "peer",
            "name",
            self._ends[1],
            "netns",
            self.a,
        )
        for name, end, address in ((self.f, self._ends[0], F_ADDRESS), (self.a, self._ends[1], A_ADDRESS)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", self.f, "link", "set", self._ends[0], "down")

    def mend(self) -> None:
        ip("-n", self.f, "link", "set", self._ends[0], "up")

    def impair(self, *how: str) -> None:
        """tc netem on F's end, such as ``delay 50ms`` or ``loss 1%``. Skips where the kernel has no netem."""
        command = ["ip", "netns", "exec", self.f, "tc", "qdisc", "replace", "dev", self._ends[0], "root", "netem", *how]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no netem here: {error}")

    def close(self) -> None:
        for name in (self.f, self.a):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


class Process:
    """A process in a namespace; ``line`` reads what it says."""

    def __init__(self, namespace: str, *command: object) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        self.popen = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean | {"FFN_FAAS_TOKEN": TOKEN},
        )

    def line(self, containing: str) -> str:
        assert self.popen.stdout is not None
        seen = []
        for line in self.popen.stdout:
            seen.append(line)
            if containing in line:
                return line
        raise AssertionError(f"{containing!r} was never said:\n{''.join(seen)}")

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def network():
    made = Network()
    yield made
    made.close()


@pytest.fixture
def start(network: Network, tmp_path: Path):
    running: list[Process] = []

    def begin(**options: object) -> tuple[Process, Process]:
        model = model_dir(tmp_path)
        f = Process(
            network.f, "ffn_faas", "serve", model, "--load-format", "dummy", "--host", F_ADDRESS, "--port", 8100
        )
        running.append(f)
        arguments = {"model": str(model), "address": f"{F_ADDRESS}:8100", **options}
        a = Process(network.a, "tests.service.remote_attention", json.dumps(arguments))
        running.append(a)
        f.line("attached over tcp")
        a.line("attached")
        return f, a

    yield begin
    for process in reversed(running):
        process.close()


def test_another_host_is_served_over_tcp_and_answered_as_its_own_first_answers(start) -> None:
    _, a = start()
    a.go()
    assert "50 equal" in a.line("done")


@pytest.mark.parametrize("how", [("delay", "50ms"), ("loss", "1%")])
def test_a_slow_or_lossy_network_changes_no_answer(network: Network, start, how: tuple[str, str]) -> None:
    _, a = start(rounds=20)
    network.impair(*how)
    a.go()
    assert "20 equal" in a.line("done")


def test_a_link_that_is_cut_ends_both_sides_sessions_within_half_a_minute(network: Network, start) -> None:
    f, a = start(rounds=1_000_000)
    a.go()
    network.cut()
    assert "lost" in a.line("failed")
    assert "left" in f.line("left")


def test_a_link_that_comes_back_is_used_again_and_no_answer_changes(network: Network, start) -> None:
    f, a = start(rounds=1_000_000, reattach=120, until_reattached=True)
    a.go()
    network.cut()
    f.line("left")
    network.mend()
    assert "equal" in a.line("done")
