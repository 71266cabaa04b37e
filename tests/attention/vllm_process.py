"""Stock vLLM and an F rank as child processes, for the tests that need the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ffn_faas.demo.ports import free_ports

from .vllm_nursery import Nursery

PROMPTS = ["The sea is", "A long time ago", "When the sun"]
SMALL = {
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 2,
    "seed": 0,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
}
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    prompts, tokens = settings.pop("prompts"), settings.pop("tokens")
    llm = LLM(**settings)
    print("READY", flush=True)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
    for prompt in prompts:
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids)]
        print("ANSWER " + json.dumps([list(output.token_ids), logprobs]), flush=True)
"""


def environment(**extra: str) -> dict[str, str]:
    """One process."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        **extra,
    }


@contextmanager
def vllm(
    model: Path,
    env: dict[str, str] | None = None,
    tokens: int = 16,
    program: tuple[str, ...] = ("-c", GENERATE),
    **settings: Any,
) -> Iterator[subprocess.Popen[str]]:
    """A process that starts ``LLM(**settings)`` and answers PROMPTS one at a time; its log is on stderr's file."""
    merged = {"model": str(model), "prompts": PROMPTS, "tokens": tokens, **SMALL, **settings}
    # Eager vLLM still compiles how it ranks log-probabilities, which takes longer than all the rest.
    surroundings = {**(env or environment()), **({"TORCHDYNAMO_DISABLE": "1"} if merged["enforce_eager"] else {})}
    command = [sys.executable, *program, json.dumps(merged)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=surroundings)
        process.log = log  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def log_of(process: subprocess.Popen[str]) -> str:
    log = process.log  # type: ignore[attr-defined]
    log.seek(0)
    text: str = log.read()
    return text


def answers(process: subprocess.Popen[str]) -> list[Any]:
    """Every answer, once the process has ended well."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, log_of(process)[-4000:]
    return [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("ANSWER ")]


@contextmanager
def f_rank(
    model: Path, *flags: str, module: str = "ffn_faas", port: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """One F rank, on a free port unless one is given, which it may take a moment to listen on."""
    port = port or free_ports()
    command = [sys.executable, "-m", module, "serve", str(model), "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(30)


def attention(port: int, **block: Any) -> dict[str, Any]:
    """Settings that make a vLLM an Attention instance of the F service at ``port``."""
    return {
        "load_format": "ffn_faas",
        "additional_config": {"afd": {"role": "attention", "port": port, **block}},
    }


def run_of(model: Path, tokens: int = 16, env: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    """What the nursery needs to do as ``vllm`` does in a process of its own."""
    merged = {**SMALL, **settings, "model": str(model)}
    return {"settings": merged, "prompts": PROMPTS, "tokens": tokens, "env": env or {}}


def answers_of(vllms: Nursery, model: Path, **run: Any) -> list[Any]:
    """Every answer of ``run_of(model, **run)``: its tokens and their log-probabilities."""
    (report,) = vllms.run(run_of(model, **run))
    return chosen(report)


def chosen(report: dict[str, Any]) -> list[Any]:
    """The answers of a report with the log-probabilities of the tokens that were said, and of no others."""
    return [
        [tokens, [position[str(token)] for token, position in zip(tokens, positions, strict=True)]]
        for tokens, positions in report["answers"]
    ]
