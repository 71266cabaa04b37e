"""A process that has imported vLLM once and forks for every use: the import costs more than a tiny model's answers.

``python -m tests.attention.vllm_nursery``: each request is one JSON line on stdin, its answer one line on stdout.
``{"start": {"function", "arguments", "env", "report"}}`` forks, with the answer the process id: the child calls
``function`` ("module:name") with the keywords ``arguments`` and writes what it returns to the path ``report``; its
log is beside that. ``{"wait": pid}`` gives its exit code once it has ended, ``{"poll": pid}`` that or null.
Workers of vLLM are forks too: its own multi-process executor, without importing everything again in each.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ffn_faas.demo.ports import free_ports
from tests.vllm_models import look_at_classes_in_process

ROOT = Path(__file__).parents[2]
IMPORTED_BY_EVERY_CHILD = (
    "compressed_tensors",
    "ffn_faas.attention.compat",
    "ffn_faas.attention.data_plane",
    "ffn_faas.attention.loader",
    "ffn_faas.attention.ops",
    "ffn_faas.connectors.shm_client",
    "ffn_faas.experts.fingerprint",
    "tests.attention.vllm_run",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "websockets.sync.client",
)


class Child:
    """A process that the nursery forked, once the nursery has answered."""

    def __init__(self, nursery: Nursery, pid: int, report: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._report = report
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._nursery.ask({"poll": self.pid})
        return self._code

    def wait(self) -> int:
        """The exit code, negative for a signal. Blocks, and every other question to the nursery with it."""
        if self._code is None:
            self._code = self._nursery.ask({"wait": self.pid})
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def log(self) -> str:
        return Path(f"{self._report}.log").read_text(errors="replace")

    def result(self) -> Any:
        """What the function returned, once it has ended well. Blocks."""
        assert self.wait() == 0, self.log()[-6000:]
        return json.loads(self._report.read_text())


class Nursery:
    """The side of the tests."""

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self._directory = directory
        self._process = process
        self._children = 0
        self._lock = threading.Lock()

    def start(self, function: str, /, env: dict[str, str] | None = None, **arguments: Any) -> Child:
        """A child that calls ``function`` ("module:name") in an environment with ``env`` added."""
        self._children += 1
        report = self._directory / f"child{self._children}.json"
        started = {"function": function, "arguments": arguments, "env": env or {}, "report": str(report)}
        return Child(self, self.ask({"start": started}), report)

    def start_run(self, run: dict[str, Any]) -> Child:
        """A child with the keywords of ``vllm_run.run``; ``env``, if in it, is its environment's."""
        return self.start("tests.attention.vllm_run:run", **run)

    def run(self, *runs: dict[str, Any]) -> list[Any]:
        """The reports of ``vllm_run.run``, in order, once all ``runs``, side by side, have ended well. Blocks."""
        children = [self.start_run(run) for run in runs]
        codes = [child.wait() for child in children]
        assert codes == [0] * len(codes), "\n".join(child.log()[-6000:] for child in children)
        return [child.result() for child in children]

    @contextmanager
    def f_rank(
        self, model: Path, *flags: str, main: str = "ffn_faas.cli:main", port: int | None = None
    ) -> Iterator[tuple[Child, int]]:
        """One F rank with ``--moe-kernel vllm``, on a free port unless one is given; stopped at the end."""
        port = port or free_ports()
        arguments = ["serve", str(model), "--port", str(port), "--moe-kernel", "vllm", *flags]
        child = self.start("tests.attention.vllm_nursery:exit_as", main=main, arguments=arguments)
        try:
            yield child, port
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to ``request``. Blocks."""
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nursery has died"
        return json.loads(answer)


@contextmanager
def nursery(env: dict[str, str]) -> Iterator[Nursery]:
    """All that ever came of it is killed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Nursery(Path(directory), process)
        finally:
            assert process.poll() is None, "something has killed the nursery"
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)


def exit_as(main: str, arguments: list[str]) -> None:
    """Ends this process as the command line program ``main`` ("module:name") does."""
    sys.exit(_found(main)(arguments))


def _found(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    from vllm.v1.executor import multiproc_executor

    for name in IMPORTED_BY_EVERY_CHILD:
        importlib.import_module(name)
    from torch._inductor.codecache import CacheBase

    CacheBase.get_system()  # hashes all of Triton, once for all forks
    gc.collect()
    gc.freeze()  # no fork looks through what all of them share
    look_at_classes_in_process()
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    for line in sys.stdin:
        ((verb, what),) = json.loads(line).items()
        if verb == "start":
            answer = os.fork()
            if answer == 0:
                _become(what)
                return
        else:
            pid, status = os.waitpid(what, os.WNOHANG if verb == "poll" else 0)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _become(child: dict[str, Any]) -> None:
    log = os.open(child["report"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(child["env"])
    result = _found(child["function"])(**child["arguments"])
    Path(child["report"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
