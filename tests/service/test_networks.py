"""F and Attention in network namespaces joined by a veth pair: two hosts as far as the network can tell."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.service.daemon import model_dir
from tests.service.slow_link import SlowLink

ROOT = Path(__file__).parents[2]
F_ADDRESS, A_ADDRESS, NOBODY = "10.231.77.1", "10.231.77.2", "10.231.77.9"
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
    """Namespaces ``f`` and ``a``, and the link between them: a veth pair, or one that can be made bad."""

    def __init__(self, *, slow: bool) -> None:
        self.f, self.a = f"ffn-f-{os.getpid()}", f"ffn-a-{os.getpid()}"
        self._ends = (f"ff{os.getpid()}", f"fa{os.getpid()}")
        for name in (self.f, self.a):
            ip("netns", "add", name)
        self.link: SlowLink | None = None
        if slow:
            self.link = SlowLink(((self.f, self._ends[0]), (self.a, self._ends[1])))
        else:
            pair = ("netns", self.f, "type", "veth", "peer", "name", self._ends[1], "netns", self.a)
            ip("link", "add", self._ends[0], *pair)
        self._address(F_ADDRESS, A_ADDRESS)
        for name, end in zip((self.f, self.a), self._ends, strict=True):
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            if slow:
                ip("-n", name, "route", "add", "10.231.77.0/24", "dev", end)

    def _address(self, of_f: str, of_a: str) -> None:
        for name, end, address in ((self.f, self._ends[0], of_f), (self.a, self._ends[1], of_a)):
            ip("-n", name, "addr", "flush", "dev", end)
            ip("-n", name, "addr", "add", f"{address}/{32 if self.link else 24}", "dev", end)

    def swap_addresses(self) -> None:
        self._address(A_ADDRESS, F_ADDRESS)

    def swap_back(self) -> None:
        self._address(F_ADDRESS, A_ADDRESS)

    def cut(self) -> None:
        ip("-n", self.f, "link", "set", self._ends[0], "down")

    def mend(self) -> None:
        ip("-n", self.f, "link", "set", self._ends[0], "up")

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        for name in (self.f, self.a):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


class Process:
    """A process in a namespace; ``line`` reads what it says."""

    def __init__(self, namespace: str, *command: object, environment: dict[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        self.popen = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean | {"FFN_FAAS_TOKEN": TOKEN} | (environment or {}),
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
def network(request: pytest.FixtureRequest):
    made = Network(slow=getattr(request, "param", None) == "slow")
    yield made
    made.close()


@pytest.fixture
def start(network: Network, tmp_path: Path):
    """Starts F, or an A, or both; ``options`` are those of tests.service.remote_attention."""
    model, running = model_dir(tmp_path), []

    def keep(process: Process) -> Process:
        running.append(process)
        return process

    def f(*more: str, **environment: str) -> Process:
        flags = ("--load-format", "dummy", "--host", F_ADDRESS, "--port", 8100, *more)
        return keep(Process(network.f, "ffn_faas", "serve", model, *flags, environment=environment))

    def a(**options: object) -> Process:
        arguments = {"model": str(model), "address": f"{F_ADDRESS}:8100", **options}
        return keep(Process(network.a, "tests.service.remote_attention", json.dumps(arguments)))

    def both(**options: object) -> tuple[Process, Process]:
        pair = f(), a(**options)
        pair[0].line("attached over tcp")
        pair[1].line("attached")
        return pair

    yield SimpleNamespace(f=f, a=a, both=both)
    for process in reversed(running):
        process.close()


def test_another_host_is_served_over_tcp_and_answered_as_its_own_first_answers(start) -> None:
    _, a = start.both()
    a.go()
    assert "50 equal" in a.line("done")


@pytest.mark.parametrize("network", ["slow"], indirect=True)
def test_50_ms_of_delay_and_1_percent_of_loss_change_no_answer(network: Network, start) -> None:
    _, a = start.both(rounds=20, going_on=100)
    network.link.delay_s = 0.05
    a.go()
    assert "20 equal" in a.line("done")
    network.link.delay_s, network.link.drop_every = 0.0, 100
    a.go()
    assert "100 equal" in a.line("done")
    assert network.link.dropped > 1


def test_a_link_that_is_cut_ends_both_sides_sessions_within_half_a_minute(network: Network, start) -> None:
    f, a = start.both(rounds=1_000_000)
    a.go()
    network.cut()
    assert "lost" in a.line("failed")
    assert "left" in f.line("left")


def test_a_link_that_comes_back_is_used_again_and_no_answer_changes(network: Network, start) -> None:
    f, a = start.both(rounds=1_000_000, reattach=120, until_reattached=True)
    a.go()
    network.cut()
    f.line("left")
    network.mend()
    assert "equal" in a.line("done")


@pytest.mark.large
def test_hosts_that_swap_addresses_lose_each_other_and_meet_again_when_they_swap_back(network: Network, start) -> None:
    f, a = start.both(rounds=1_000_000, reattach=120, until_reattached=True)
    a.go()
    network.swap_addresses()
    f.line("left")
    network.swap_back()
    assert "equal" in a.line("done")


def test_a_peer_that_has_forgotten_its_connections_is_noticed_and_its_successor_served(network: Network, start) -> None:
    """Half open: A's host died and came back while nothing could reach F."""
    f, a = start.both()
    network.cut()
    a.close()
    network.mend()
    f.line("left")
    successor = start.a()
    successor.line("attached")
    successor.go()
    assert "50 equal" in successor.line("done")


def test_an_address_that_nobody_has_is_named(start) -> None:
    a = start.a(address=f"{NOBODY}:8100", patience=3)
    said = a.line("SessionLost:")
    assert f"F rank 0 at {NOBODY}:8100 did not answer within 3 s" in said
    assert a.popen.wait(30) == 1


def test_an_f_rank_that_advertises_an_address_that_nobody_has_is_named(start) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": F_ADDRESS}
    ranks = [
        start.f("--advertise-address", advertised, RANK=rank, LOCAL_RANK=rank, **world)
        for rank, advertised in (("0", F_ADDRESS), ("1", NOBODY))
    ]
    for rank in ranks:
        rank.line("READY after")
    said = start.a(patience=5).line("SessionLost:")
    assert f"F rank 1 at {NOBODY}:8101 did not answer within" in said
