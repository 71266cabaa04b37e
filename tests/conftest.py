"""How the suite is spread over two workers (``pytest -n 2``), which also works without any."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.attention.vllm_nursery import Nursery, nursery
from tests.attention.vllm_process import environment

ONE_AT_A_TIME = (
    "tests/e2e/test_demo",
    "tests/e2e/test_deaths",
    "tests/e2e/test_chaos",
    "tests/deploy/test_gating_in_vllm",
)
"""Files that kill many-process vLLMs or look for what such a death leaves in /dev/shm: never two of them at once."""

LONGEST_FIRST = (
    *ONE_AT_A_TIME,
    "tests/e2e/test_architectures",
    "tests/attention/test_forms",
    "tests/experts/test_against_vllm_loader",
    "tests/attention/test_in_vllm",
    "tests/cam/test_in_vllm",
    "tests/cam/test_failures",
)
"""Begun last, one of them would keep a worker alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="also run tests marked large")


def pytest_configure() -> None:
    """vLLM binds its threads to the first core, in every process: each worker of the suite gives it another one.

    And one thread: two that share a core wait for each other by spinning, in every operation.
    """
    # A shell's background job ignores Ctrl-C, and so would everything that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cores = sorted(os.sched_getaffinity(0))
    if worker and len(cores) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[int(worker.removeprefix("gw")) % len(cores)]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--large"):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="large: give --large"))
    items.sort(key=lambda item: _place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole, since their fixtures are costly, and those that must not meet share a worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "one at a time" if nodeid.startswith(ONE_AT_A_TIME) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)


def _place(nodeid: str) -> int:
    return next((place for place, name in enumerate(LONGEST_FIRST) if nodeid.startswith(name)), len(LONGEST_FIRST))


@pytest.fixture(scope="session")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where tests that need vLLM's engine, and not its processes, get it; one thread each."""
    pytest.importorskip("torch")
    pytest.importorskip("vllm")
    cache_root = str(tmp_path_factory.mktemp("vllm-cache"))
    with nursery(environment(VLLM_CACHE_ROOT=cache_root, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")) as made:
        yield made
