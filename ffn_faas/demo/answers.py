"""What a model answered, how it is asked for, and how stock answers are kept between runs."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ffn_faas.demo import http_client
from ffn_faas.demo.processes import ChildFailed

MODEL_NAME = "demo"
TOP = 5
"""Log-probabilities asked for at each position: the best so many tokens."""


@dataclass(frozen=True)
class Answer:
    """A greedy completion. ``logprobs`` are those of the chosen tokens; ``top`` the best tokens' at each position."""

    prompt: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top: list[dict[str, float]]
    seconds: float


@dataclass(frozen=True)
class ServedRun:
    """One vLLM: its answers, seconds until it served, and the memory of its processes after answering."""

    answers: list[Answer]
    ready_s: float
    rss_bytes: int
    pss_bytes: int

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(answer.seconds for answer in self.answers)
        return sum(len(answer.token_ids) for answer in self.answers) / seconds if seconds else 0.0


def ask(port: int, prompt: str, max_tokens: int, timeout_s: float) -> Answer:
    """One greedy completion over the OpenAI API. Raises ChildFailed when the server answers with an error."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": TOP,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    begin = time.monotonic()
    status, reply = http_client.request(port, "POST", "/v1/completions", body, timeout_s)
    seconds = time.monotonic() - begin
    if status != 200 or reply is None:
        raise ChildFailed(f"the completion on port {port} was answered with HTTP {status}: {reply}")
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    return Answer(
        prompt=prompt,
        text=choice["text"],
        token_ids=choice["token_ids"],
        logprobs=logprobs["token_logprobs"],
        top=logprobs["top_logprobs"],
        seconds=seconds,
    )


def fingerprint(facts: dict[str, Any]) -> str:
    """sha256 of everything that stock answers depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load_run(path: Path, key: str) -> ServedRun | None:
    """The run kept in ``path`` under the same fingerprint, None when there is none."""
    try:
        content = json.loads(path.read_text())
        if content["fingerprint"] != key:
            return None
        run = content["run"]
        return ServedRun(**{**run, "answers": [Answer(**answer) for answer in run["answers"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_run(path: Path, key: str, run: ServedRun) -> None:
    """Keep a run for ``load_run``."""
    path.write_text(json.dumps({"fingerprint": key, "run": asdict(run)}) + "\n")
