"""F dies, stops, hangs and comes back under a numpy Attention, with real processes: answers are equal, or none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.ports import free_ports
from tests.data import TinyModel

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
ROUNDS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("reattach") / "tiny")


class F:
    """An F rank that can be killed and started again on its port."""

    def __init__(self, model: Path) -> None:
        self.model, self.port = model, free_ports()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, model: Path | None = None) -> None:
        command = [sys.executable, "-m", "ffn_faas", "serve", str(model or self.model), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture
def f(model: Path) -> Iterator[F]:
    made = F(model)
    yield made
    made.kill()


class Attention:
    def __init__(self, process: subprocess.Popen[str], log: Any) -> None:
        self.process, self._log = process, log

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def until(self, number: int) -> list[str]:
        lines = []
        while not lines or not lines[-1].startswith(f"{number} "):
            lines.append(self.line())
            assert lines[-1], self.log()
        return lines

    def rest(self) -> list[str]:
        output = self.process.stdout.read()
        self.process.wait(30)
        return output.split("\n")[:-1]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()


@contextmanager
def attention(f: F, **options: Any) -> Iterator[Attention]:
    arguments = {"model": str(f.model), "port": f.port, "rounds": ROUNDS, **options}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.attention.attention_process", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
        try:
            made = Attention(process, log)
            assert made.line() == "attached", made.log()
            yield made
        finally:
            process.kill()
            process.wait(10)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[str]:
    f = F(model)
    try:
        with attention(f) as run:
            lines = run.rest()
            assert run.process.returncode == 0
    finally:
        f.kill()
    assert len(lines) == ROUNDS
    assert len({line.split()[1] for line in lines}) > ROUNDS // 2
    return lines


def test_f_killed_three_times_under_load_changes_no_answer(f: F, undisturbed: list[str]) -> None:
    with attention(f, reattach_timeout_s=60, pause_s=0.01) as run:
        lines = []
        for number in (10, 40, 70):
            lines += run.until(number)
            f.kill()
            f.start()
        assert lines + run.rest() == undisturbed, run.log()
        assert run.process.returncode == 0
        assert run.log().count("F is back after") == 3


def test_an_f_that_is_stopped_in_order_is_waited_for_too(f: F, undisturbed: list[str]) -> None:
    with attention(f, reattach_timeout_s=60, pause_s=0.01) as run:
        lines = run.until(10)
        f.signal(signal.SIGTERM)
        assert f.process.wait(30) == 0
        f.start()
        assert lines + run.rest() == undisturbed, run.log()


def test_an_idle_attention_survives_a_restart_of_f(f: F, undisturbed: list[str]) -> None:
    with attention(f, reattach_timeout_s=60, rounds=1, idle=True) as run:
        run.until(0)
        f.kill()
        time.sleep(1.0)
        f.start()
        run.process.stdin.write("go\n")
        run.process.stdin.flush()
        assert run.line().split()[1] == undisturbed[0].split()[1]


def test_without_a_reattach_timeout_a_loss_fails_at_once(f: F) -> None:
    with attention(f, pause_s=0.01) as run:
        run.until(3)
        f.kill()
        killed = time.monotonic()
        assert run.rest()[-1].startswith(f"failed F rank 0 at 127.0.0.1:{f.port} is lost")
        assert time.monotonic() - killed < 10


def test_an_f_that_does_not_come_back_fails_after_the_timeout_naming_it(f: F) -> None:
    with attention(f, pause_s=0.01, reattach_timeout_s=2) as run:
        run.until(3)
        f.kill()
        killed = time.monotonic()
        assert "F did not come back within 2 s (reattach_timeout_s)" in run.rest()[-1]
        assert 1.5 < time.monotonic() - killed < 15


def test_another_checkpoint_is_refused_with_both_values(f: F, tmp_path: Path) -> None:
    other = TinyModel(seed=1, experts=16).write(tmp_path / "other")
    with attention(f, pause_s=0.01, reattach_timeout_s=60) as run:
        run.until(3)
        f.kill()
        f.start(other)
        assert "num experts: Attention has 8, F has 16" in run.rest()[-1]


def test_a_stopped_f_is_found_by_its_answer_and_attached_to_again_when_it_goes_on(f: F, undisturbed: list[str]) -> None:
    with attention(f, pause_s=0.01, reattach_timeout_s=60, answer_timeout_s=1) as run:
        lines = run.until(10)
        f.signal(signal.SIGSTOP)
        time.sleep(3.0)
        f.signal(signal.SIGCONT)
        assert lines + run.rest() == undisturbed, run.log()
        assert "has not answered a post for" in run.log()
        assert "F is back after" in run.log()


def test_one_attention_killed_or_stopped_does_not_disturb_another(f: F, undisturbed: list[str]) -> None:
    with attention(f, pause_s=0.02) as run, attention(f, rounds=10**6) as killed, attention(f, rounds=10**6) as stopped:
        lines = run.until(5)
        killed.process.kill()
        stopped.process.send_signal(signal.SIGSTOP)
        assert lines + run.rest() == undisturbed, run.log()
