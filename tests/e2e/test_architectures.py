"""Every architecture that stock vLLM runs on a CPU: with F's experts it says what it says with its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.families import FAMILIES
from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.report import LARGEST_ERROR_RATIO

from .demo_process import environment

pytest.importorskip("torch")
pytest.importorskip("vllm")
ROOT = Path(__file__).parents[2]
COMPILED = ("deepseek_v3", "gpt_oss", "mixtral")
"""Latent attention with grouped top-k and shared experts; biases and a class of its own; the plain case."""


@contextmanager
def f_world(model: Path, ranks: int, kernel: str = "vllm") -> Iterator[int]:
    """Yields the port of F rank 0."""
    port, master = free_ports(ranks), free_ports()
    command = [sys.executable, "-m", "ffn_faas", "serve", str(model), "--port", str(port), "--moe-kernel", kernel]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(master)}
        environment = {**os.environ, **world, **place} if ranks > 1 else None
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment))
    try:
        yield port
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


class Worker:
    """A process of ``architecture_run``, started when it is first asked, and again after it died."""

    def __init__(self, directory: Path, mode: str) -> None:
        self._directory = directory
        self._mode = mode
        self._process: subprocess.Popen[str] | None = None

    def compare(self, model: Path, port: int) -> dict[str, Any]:
        """Stock's and Attention's answers."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"model": str(model), "port": port, "mode": self._mode}) + "\n")
        process.stdin.flush()
        line = next((line for line in process.stdout if line.startswith("RESULT ")), None)
        assert line is not None, self._log.read_text(errors="replace")[-4000:]
        answer: dict[str, Any] = json.loads(line.partition(" ")[2])
        assert "error" not in answer, answer["error"]
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            surroundings = {
                **environment(f"--{self._mode}"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                "VLLM_CACHE_ROOT": str(self._directory / "vllm-cache"),
                "HF_HUB_OFFLINE": "1",
            }
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.e2e.architecture_run"],
                    cwd=ROOT,
                    env=surroundings,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        return self._process

    @property
    def _log(self) -> Path:
        return self._directory / f"vllm-{self._mode}.log"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def workers(models: Path) -> Iterator[dict[str, Worker]]:
    made = {mode: Worker(models, mode) for mode in ("eager", "compiled")}
    yield made
    for worker in made.values():
        worker.close()


def checkpoint(models: Path, arch: str) -> Path:
    make_checkpoint(models / arch, arch)
    return models / arch


@pytest.mark.parametrize(
    ("arch", "mode"), [*((arch, "eager") for arch in FAMILIES), *((arch, "compiled") for arch in COMPILED)]
)
def test_every_token_and_logprob_equals_stock(models: Path, workers: dict[str, Worker], arch: str, mode: str) -> None:
    model = checkpoint(models, arch)
    with f_world(model, ranks=1) as port:
        found = workers[mode].compare(model, port)
    stock, attention = found["stock"], found["attention"]
    assert [len(answer["tokens"]) for answer in stock["answers"]] == [48] * 6
    assert len({token for answer in stock["answers"] for token in answer["tokens"]}) >= 20
    assert attention["answers"] == stock["answers"]
    assert sum(nbytes for _, _, nbytes in stock["layers"]) > 0
    assert sum(nbytes for _, _, nbytes in attention["layers"]) == 0
    assert [name for name, _, _ in attention["layers"]] == [name for name, _, _ in stock["layers"]]


@pytest.mark.parametrize("arch", ["qwen3_moe", *FAMILIES])
def test_three_f_ranks_are_about_as_exact_as_stocks_kernel_in_every_layer(models: Path, arch: str) -> None:
    from ffn_faas.demo.layer_errors import layer_errors

    model = checkpoint(models, arch)
    with f_world(model, ranks=3) as port:
        errors = layer_errors(model, port)
    assert len(errors) in (3, 4)
    assert max(error.ratio for error in errors) <= LARGEST_ERROR_RATIO
    assert all(0 < error.stock_error < 0.02 for error in errors)
