"""``demo --chaos``: F is killed and started again while one Attention serves a load and another one a single stream.

The load's requests are counted: none may fail. The stream's tokens are compared with those of the same prompts before
anything was disturbed: all must be equal.
"""

from __future__ import annotations

import http.client
import itertools
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from ffn_faas.demo import answers, commands
from ffn_faas.demo.answers import Answer
from ffn_faas.demo.corpus import prompts
from ffn_faas.demo.options import DemoOptions
from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.processes import Child, ChildFailed, Children
from ffn_faas.demo.progress import say, wait_ready, watched
from ffn_faas.demo.runner import make_model

LOAD_WORKERS = 2
REATTACH_TIMEOUT_S = 120.0


class Asker:
    """Asks without pause, each of ``workers`` threads one prompt after another, until told to stop."""

    def __init__(self, port: int, options: DemoOptions, asked: list[str], workers: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self.longest_gap_s = 0.0
        self._port, self._options, self._asked = port, options, asked
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._threads = [threading.Thread(target=self._run, args=(asked[n::workers],)) for n in range(workers)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        """Let the requests on their way end; what has not ended in time counts as failed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._options.timeout_s)
            if thread.is_alive():
                self.failures.append(f"no answer within {self._options.timeout_s:.0f} s")

    def _run(self, asked: list[str]) -> None:
        for prompt in itertools.cycle(asked):
            if self._stop.is_set():
                return
            try:
                self._note(answers.ask(self._port, prompt, self._options.max_tokens, self._options.timeout_s))
            except (ChildFailed, OSError, http.client.HTTPException) as error:
                self.failures.append(f"{prompt!r}: {error}")
                self._stop.wait(0.5)

    def _note(self, answer: Answer) -> None:
        with self._lock:
            now = time.monotonic()
            self.longest_gap_s, self._last = max(self.longest_gap_s, now - self._last), now
            self.answers.append(answer)


@dataclass(frozen=True)
class ChaosResult:
    undisturbed: list[Answer]
    stream: Asker
    load: Asker
    restarts: int

    @property
    def failures(self) -> list[str]:
        return self.stream.failures + self.load.failures

    @property
    def tokens_equal(self) -> bool:
        expected = {answer.prompt: answer.token_ids for answer in self.undisturbed}
        given = self.stream.answers
        return bool(given) and all(answer.token_ids == expected[answer.prompt] for answer in given)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens_equal": self.tokens_equal,
            "tokens_compared": sum(len(answer.token_ids) for answer in self.stream.answers),
            "requests": len(self.stream.answers) + len(self.load.answers) + len(self.failures),
            "failed_requests": len(self.failures),
            "failures": self.failures[:5],
            "restarts": self.restarts,
            "longest_gap_s": round(max(self.stream.longest_gap_s, self.load.longest_gap_s), 2),
        }

    def failure(self) -> str | None:
        """Why this run did not show what it promises; None when it did."""
        if self.failures:
            return f"{len(self.failures)} request(s) failed, the first: {self.failures[0]}"
        return None if self.tokens_equal else "tokens changed when F was killed and started again"


def run_chaos(options: DemoOptions, restarts: int) -> ChaosResult:
    """Everything in order; starts and stops all processes. Raises FfnError with the failing process's log."""
    model = make_model(options)
    ffn_port = free_ports(options.ffn_ranks, key=str(options.work_dir))
    stream_port, load_port = free_ports(), free_ports()
    ffn = commands.ffn(model, ffn_port, options.ffn_ranks, options.moe_kernel, free_ports())
    cache = options.work_dir / "vllm-cache"
    with Children() as children:

        def start_f(number: int) -> Child:
            log = options.work_dir / f"ffn-{number}.log"
            return children.start("F", ffn.arguments, ffn.environment, log)

        def start_attention(name: str, port: int) -> Child:
            command = commands.attention(
                model, port, ffn_port, options.compiled, cache, reattach_timeout_s=REATTACH_TIMEOUT_S
            )
            log = options.work_dir / f"{name}.log"
            return children.start(f"Attention ({name})", command.arguments, command.environment, log)

        # All at once: whoever is up first waits for the others.
        f = start_f(0)
        started = [(start_attention(name, port), port) for name, port in (("stream", stream_port), ("load", load_port))]
        wait_ready(children, f, ffn_port, "/ready", options.timeout_s)
        for attention, port in started:
            wait_ready(children, attention, port, "/health", options.timeout_s)
        asked = prompts(options.prompts)

        def ask(number: int) -> Answer:
            prompt = asked[number % len(asked)]
            return watched(children, lambda: answers.ask(stream_port, prompt, options.max_tokens, options.timeout_s))

        undisturbed = [ask(number) for number in range(len(asked))]
        say(f"undisturbed: {len(undisturbed)} answers; now F is killed {restarts} times")
        stream, load = Asker(stream_port, options, asked, 1), Asker(load_port, options, prompts(8), LOAD_WORKERS)
        for number in range(1, restarts + 1):
            _wait_for_answers(children, options, stream, load)
            children.kill(f)
            say(f"F killed, {number} of {restarts}; {len(stream.answers)} + {len(load.answers)} answers so far")
            f = start_f(number)
            wait_ready(children, f, ffn_port, "/ready", options.timeout_s)
        _wait_for_answers(children, options, stream, load)
        stream.stop()
        load.stop()
        children.require_alive()
        for attention, _ in started:
            attention.signal(signal.SIGTERM)
        for attention, _ in started:
            children.stop(attention, terminate=lambda: None)
    return ChaosResult(undisturbed, stream, load, restarts)


def _wait_for_answers(children: Children, options: DemoOptions, *askers: Asker) -> None:
    """Until each has another answer, or a failure, and a moment more, so that F dies in the middle of something."""
    before = [len(asker.answers) + len(asker.failures) for asker in askers]
    deadline = time.monotonic() + options.timeout_s
    while any(len(a.answers) + len(a.failures) <= n for a, n in zip(askers, before, strict=True)):
        children.require_alive()
        if time.monotonic() > deadline:
            raise ChildFailed(f"no answer within {options.timeout_s:.0f} s of F's return")
        time.sleep(0.05)
    time.sleep(0.2)
