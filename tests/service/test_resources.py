"""What an F rank lacks or cannot read is one clear error with its exit code, and nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data import TinyModel
from tests.service.daemon import CONFIG, Daemon, free_port, is_listening, wait_ready
from tests.service.player import Player

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LARGE = {**CONFIG, "hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 32, "num_hidden_layers": 2}
LARGE_BYTES = 32 * 2 * 3 * 1024 * 1024 * 2


def confined(how: str, *arguments: object) -> Daemon:
    return Daemon(*arguments, module=["tests.service.confined", how, "ffn_faas"])


def truncate(model: Path) -> str:
    file = model / "model-00002-of-00002.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 100)
    return r"model-00002-of-00002\.safetensors is truncated"


def corrupt(model: Path) -> str:
    file = model / "model-00001-of-00002.safetensors"
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(b"}")
    return r"model-00001-of-00002\.safetensors.* not JSON"


def lose(model: Path) -> str:
    (model / "model-00002-of-00002.safetensors").unlink()
    return r"model-00002-of-00002\.safetensors, which is missing"


def require_one_error(daemon: Daemon, port: int, said: str, code: int = 6) -> None:
    """The process ends with ``code``, having said one error that matches, and holds nothing any more."""
    ended, output = daemon.finish()
    assert ended == code, output
    assert "Traceback" not in output
    (error,) = re.findall(" ERROR (.*)", output)
    assert re.search(said, error)
    assert not is_listening(port)


@pytest.mark.parametrize("harm", [truncate, corrupt, lose])
def test_a_broken_checkpoint_is_named_and_ends_f_with_6(tmp_path: Path, harm) -> None:
    said, port = harm(TinyModel().write(tmp_path, 2)), free_port()
    with Daemon(tmp_path, "--port", port, "--exit-record", tmp_path / "records") as daemon:
        require_one_error(daemon, port, said)
    record = json.loads((tmp_path / "records" / "ffn-rank-0.json").read_text())
    assert record["exit_code"] == 6
    assert re.search(said, record["reason"])


def large_model(directory: Path, **changes: int) -> Path:
    (directory / "config.json").write_text(json.dumps({**LARGE, **changes}))
    return directory


def test_an_address_space_that_is_too_small_for_the_experts_ends_f_with_6(tmp_path: Path) -> None:
    port = free_port()
    # 64 bit Python with its threads' stacks maps about half of that before anything is loaded.
    how = f"address-space={LARGE_BYTES + 512 * MIB}"
    model = large_model(tmp_path, num_experts=128)
    with confined(how, model, "--load-format", "dummy", "--port", port) as daemon:
        require_one_error(daemon, port, "cannot allocate [0-9]+ bytes for experts .use more F ranks")


class Cgroup:
    """A limit of memory below this process's own, in the first hierarchy that lets us."""

    def __init__(self, nbytes: int) -> None:
        for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            self.directory = Path(root, f"ffn-test-{os.getpid()}")
            try:
                self.directory.mkdir()
            except OSError:
                continue
            try:
                (self.directory / limit).write_text(str(nbytes))
            except OSError:
                self.close()
                continue
            return
        pytest.skip("no cgroup of memory can be made here")

    def close(self) -> None:
        self.directory.rmdir()


@pytest.fixture
def cgroup():
    made = Cgroup(LARGE_BYTES + 256 * MIB)
    yield made.directory
    made.close()


def test_a_memory_limit_that_another_process_uses_up_meanwhile_ends_f_with_6(tmp_path: Path, cgroup: Path) -> None:
    """Two F ranks of one container, which has room for one and a half: no one is killed for it."""
    model, ports = large_model(tmp_path), [free_port(), free_port()]
    both = [confined(f"cgroup={cgroup}", model, "--load-format", "dummy", "--port", port) for port in ports]
    with both[0], both[1]:
        ended, served = [], []
        for daemon, port in zip(both, ports, strict=True):
            wait_ended_or_ready(daemon, port)
            (ended if daemon.process.poll() is not None else served).append((daemon, port))
        assert ended, "both found room"
        for daemon, port in ended:
            require_one_error(
                daemon, port, "experts still to be loaded need [0-9]+ bytes, the memory limit of this cont"
            )


def wait_ended_or_ready(daemon: Daemon, port: int) -> None:
    while daemon.process.poll() is None:
        try:
            wait_ready(port, timeout=0.1)
        except AssertionError:
            continue
        return


@pytest.mark.skipif(os.getuid() != 0, reason="a /dev/shm of one's own needs root")
@pytest.mark.parametrize("how", ["shm-read-only", "shm-full"])
def test_windows_need_nothing_of_dev_shm(tmp_path: Path, how: str) -> None:
    probe = [sys.executable, "-m", "tests.service.confined", how, "this"]
    if subprocess.run(probe, capture_output=True, cwd=ROOT, check=False).returncode != 0:
        pytest.skip("no mount namespace of its own can be had here")
    model, port = tmp_path, free_port()
    (model / "config.json").write_text(json.dumps(CONFIG))
    with confined(how, model, "--load-format", "dummy", "--dtype", "float32", "--port", port):
        wait_ready(port)
        player = Player(port, model, "windows").join()
        player.dispatched()
        call, _, x, *_ = player._post
        out = np.full_like(x, np.nan)
        player.session.client.combine(call, out.ctypes.data)
        assert np.isfinite(out).all()
        assert out.any()
        player.close()
