"""Recorded requests sent to two deployments in brackets, A B B A, so that a machine that drifts favours neither."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffn_faas.bench import report
from ffn_faas.bench.openai_client import OpenAiServer
from ffn_faas.errors import UsageError

ORDER = (0, 1, 1, 0)
SETTLE_S = 2.0
"""Before each pass: vLLM's processes spin for a second after their last request, on cores that the other may share."""
COLUMNS = {
    "concurrency": "in flight",
    "a_tokens_per_s": "A tokens/s",
    "b_tokens_per_s": "B tokens/s",
    "a_over_b": "A / B",
    "a_p50_s": "A request s",
    "a_p99_s": "p99",
    "b_p50_s": "B request s",
    "b_p99_s": "p99",
    "spread": "spread",
}


@dataclass(frozen=True)
class Pass:
    """All requests once: seconds of the whole pass, tokens answered, seconds of each request."""

    seconds: float
    tokens: int
    latencies: Sequence[float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def read_requests(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line, as /v1/completions takes it: ``prompt`` (text or token ids), ``max_tokens`` and so on.

    ``model`` is put in by the replay. Raises UsageError naming the line that is not such an object.
    """
    requests: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--replay: cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(request, dict) or "prompt" not in request:
            raise UsageError(f"{path}, line {number}: an object with a prompt is needed")
        requests.append(request)
    if not requests:
        raise UsageError(f"{path} holds no request")
    return requests


def run(
    requests: Sequence[dict[str, Any]],
    urls: Sequence[str],
    concurrency: Sequence[int],
    brackets: int = 1,
    settle_s: float = SETTLE_S,
) -> dict[str, Any]:
    """Blocks until every request was answered four times a bracket for each concurrency; both rest ``settle_s`` before.

    A pass of each server with the largest concurrency comes first and is not counted. Raises UsageError unless there
    are two URLs, ResourceError when a server does not answer or refuses a request.
    """
    if len(urls) != 2:
        raise UsageError(f"--deployments names {len(urls)} servers, two are needed", remedy="URL,URL")
    rows = []
    with ExitStack() as stack:
        servers = [OpenAiServer(url) for url in urls]
        for server in servers:
            stack.callback(server.close)
            one_pass(requests[: max(concurrency)], server.complete, max(concurrency))
        for in_flight in concurrency:
            passes: list[list[Pass]] = [[], []]
            for which in ORDER * brackets:
                time.sleep(settle_s)
                passes[which].append(one_pass(requests, servers[which].complete, in_flight))
                servers[which].close()  # its threads have ended
            rows.append(row(in_flight, *passes))
    return {"deployments": {"A": urls[0], "B": urls[1]}, "requests": len(requests), "rows": rows}


def one_pass(requests: Sequence[dict[str, Any]], complete: Callable[[dict[str, Any]], int], concurrency: int) -> Pass:
    """``complete`` answers one request and returns its tokens. Requests start in order; threads wait for each other
    before the first."""
    start = threading.Barrier(concurrency)
    begins: list[float] = []

    def ready() -> None:
        start.wait()
        begins.append(time.monotonic())

    def ask(request: dict[str, Any]) -> tuple[int, float]:
        begin = time.monotonic()
        return complete(request), time.monotonic() - begin

    with ThreadPoolExecutor(concurrency, initializer=ready) as pool:
        # A worker thread is made for each task until there are enough; idle tasks fill up a short list of requests.
        idle = [pool.submit(float) for _ in range(max(0, concurrency - len(requests)))]
        answers = list(pool.map(ask, requests))
        end = time.monotonic()
        for task in idle:
            task.result()
    return Pass(end - min(begins), sum(tokens for tokens, _ in answers), [seconds for _, seconds in answers])


def row(concurrency: int, a: Sequence[Pass], b: Sequence[Pass]) -> dict[str, Any]:
    """``a_over_b`` compares all tokens of all seconds; ``spread`` is the larger of max / min - 1 of A's and B's."""
    result: dict[str, Any] = {"concurrency": concurrency}
    rates = []
    for name, passes in (("a", a), ("b", b)):
        rates.append(sum(one.tokens for one in passes) / sum(one.seconds for one in passes))
        latencies = [seconds for one in passes for seconds in one.latencies]
        result[f"{name}_tokens_per_s"] = rates[-1]
        result[f"{name}_p50_s"], result[f"{name}_p99_s"] = report.quantiles(latencies)
        result[f"{name}_passes"] = [one.tokens_per_s for one in passes]
    result["a_over_b"] = rates[0] / rates[1]
    speeds = [[one.tokens_per_s for one in passes] for passes in (a, b)]
    result["spread"] = max(max(speed) / min(speed) - 1 for speed in speeds)
    return result


def print_table(result: dict[str, Any]) -> str:
    """One line for each concurrency."""
    a, b = result["deployments"].values()
    return f"A {a}, B {b}, {result['requests']} requests, A B B A\n{report.table(result['rows'], COLUMNS)}"
