"""The command lines and environments that the demo starts: exactly what a user would type. Pure but for the Python
interpreter's path and the inherited environment."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ffn_faas import env
from ffn_faas.demo.answers import MODEL_NAME

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environment: dict[str, str]


def ffn(model: Path, port: int, ranks: int, moe_kernel: str, master_port: int) -> Command:
    """F: one process, or a torchrun world whose rank r listens on ``port`` + r."""
    serve = ["-m", "ffn_faas", "serve", str(model), "--port", str(port), "--moe-kernel", moe_kernel]
    serve += ["--max-num-batched-tokens", str(MAX_MODEL_LEN)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(master_port)]
    arguments = [sys.executable, *([] if ranks == 1 else launcher), *serve]
    return Command(arguments, env.child_environment())


def attention(
    model: Path, port: int, ffn_port: int, compiled: bool, cache: Path, reattach_timeout_s: float = 0.0
) -> Command:
    """Stock vLLM whose routed experts are F's."""
    afd: dict[str, object] = {"role": "attention", "host": "127.0.0.1", "port": ffn_port}
    if reattach_timeout_s:
        afd["connector_extra_config"] = {"reattach_timeout_s": reattach_timeout_s}
    block = {"afd": afd}
    extra = ["--load-format", "ffn_faas", "--additional-config", json.dumps(block)]
    return _vllm(model, port, compiled, cache, extra, plugins="ffn_faas")


def stock(model: Path, port: int, compiled: bool, cache: Path) -> Command:
    """The same vLLM without our plugin, holding all experts itself."""
    return _vllm(model, port, compiled, cache, [], plugins="")


def _vllm(model: Path, port: int, compiled: bool, cache: Path, extra: list[str], plugins: str) -> Command:
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    arguments += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--seed", "0"]
    arguments += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(MAX_MODEL_LEN)]
    arguments += ["--max-num-seqs", "4", "--no-enable-prefix-caching"]
    arguments += [*([] if compiled else ["--enforce-eager"]), *extra]
    environment = env.child_environment(
        VLLM_PLUGINS=plugins,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CACHE_ROOT=str(cache),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    return Command(arguments, environment)
