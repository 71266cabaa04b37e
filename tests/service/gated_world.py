"""A world of gated F ranks as processes (see gated_f), and what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.service.daemon import CONFIG, free_port, is_listening, runs
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PHASES = ("starting", "loading", "capturing", "ready")


class GatedWorld:
    """``ranks`` processes, started here or by torchrun, that stop at closed gates; all of it ends with the block."""

    def __init__(
        self,
        directory,
        ranks=2,
        *,
        torchrun=False,
        closed=(),
        flags=(),
        max_restarts=0,
        environment=(),
        model=None,
        dtype="float32",
    ):
        """``model``: a directory with a config.json, instead of the daemon tests' own."""
        self.directory, self.ranks = directory, ranks
        self.gates, self.records = directory / "gates", directory / "records"
        self._environment = dict(environment)
        self.gates.mkdir(parents=True)
        if model is None:
            model = directory / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(CONFIG))
        for place in closed:
            self.close(place)
        self.model, self.port, self.client = model, free_port(ranks), httpx.Client(timeout=10)
        arguments = [str(self.gates), str(model), "--load-format", "dummy", "--dtype", dtype]
        arguments += ["--port", str(self.port), "--exit-record", str(self.records), *flags]
        self.shared_memory: set[Path] = set()
        if torchrun:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            launcher += ["--max-restarts", str(max_restarts), "--master-port", str(free_port())]
            self.processes = [self._start([*launcher, "-m", "tests.service.gated_f", *arguments], {})]
        else:
            command = [sys.executable, "-m", "tests.service.gated_f", *arguments]
            common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            self._launch = lambda: [
                self._start(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
            ]
            self.processes = self._launch()

    def kill_and_start_again(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = self._launch()

    def _start(self, command, environment):
        clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        log = (self.directory / "log").open("ab")
        with log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
                env={**clean, **self._environment, **environment},
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open_all()
        for rank in range(self.ranks):
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(self.record(rank)["pid"], signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.client.close()

    def close(self, place, rank=None):
        for each in range(self.ranks) if rank is None else [rank]:
            (self.gates / f"{place}-{each}").touch()

    def open(self, place, rank=None):
        for each in range(self.ranks) if rank is None else [rank]:
            (self.gates / f"{place}-{each}").unlink(missing_ok=True)
            (self.gates / f"at-{place}-{each}").unlink(missing_ok=True)

    def open_all(self):
        for gate in self.gates.iterdir():
            gate.unlink(missing_ok=True)

    def is_at(self, place, rank):
        return (self.gates / f"at-{place}-{rank}").exists()

    def wait_at(self, place, rank=None):
        for each in range(self.ranks) if rank is None else [rank]:
            wait_until(lambda each=each: self.is_at(place, each), what=f"rank {each} at {place}: {self.log()}")
        self._note_shared_memory()

    def wait_phase(self, phase):
        for rank in range(self.ranks):
            wait_until(lambda rank=rank: self.phase(rank) == phase, what=f"{phase} of rank {rank}: {self.log()}")
        self._note_shared_memory()

    def get(self, path, rank=0):
        return self.client.get(f"http://127.0.0.1:{self.port + rank}{path}")

    def phase(self, rank):
        try:
            return self.get("/ready", rank).json()["phase"]
        except httpx.TransportError:
            return ""

    def sessions(self, rank):
        """Attached instances, by name: their window bytes."""
        status = self.get("/status", rank).json()
        return {session["instance"]: session["window_bytes"] for session in status["sessions"]}

    def record(self, rank):
        return json.loads((self.records / f"ffn-rank-{rank}.json").read_text())

    def pid(self, rank):
        return self.record(rank)["pid"]

    def wait_ended(self, rank, timeout):
        """Until the rank's process is gone; returns the seconds that took."""
        pid = self.pid(rank)
        return wait_until(lambda: not runs(pid), timeout, f"the end of rank {rank}: {self.log()}")

    def require_nothing_left(self):
        """No process, no port, nothing in /dev/shm; ``processes`` have been waited for."""
        for rank in range(self.ranks):
            assert not runs(self.pid(rank))
            wait_until(lambda rank=rank: not is_listening(self.port + rank), 5, "freeing the port")
        assert [path for path in self.shared_memory if path.exists()] == []

    def _note_shared_memory(self):
        """What the ranks have of /dev/shm; other programs' entries are theirs."""
        for rank in range(self.ranks):
            process = Path(f"/proc/{self.pid(rank)}")
            with contextlib.suppress(OSError):  # dead, or closed meanwhile
                used = [line.split()[-1] for line in (process / "maps").read_text().splitlines()]
                used += [str(entry.readlink()) for entry in (process / "fd").iterdir()]
                self.shared_memory |= {Path(name) for name in used if name.startswith("/dev/shm/")}

    def log(self):
        return (self.directory / "log").read_text()
