"""Every architecture that stock vLLM runs on a CPU: with F's experts it says what it says with its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo import qwen3_moe
from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.corpus import prompts
from ffn_faas.demo.families import FAMILIES
from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.report import LARGEST_ERROR_RATIO
from ffn_faas.demo.shapes import shape_for
from tests.attention.vllm_nursery import Nursery
from tests.attention.vllm_process import attention

pytest.importorskip("torch")
pytest.importorskip("vllm")
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
    "seed": 0,
    "kv_cache_memory_bytes": 64 << 20,
}


@contextmanager
def f_world(model: Path, ranks: int, kernel: str, *flags: str) -> Iterator[int]:
    """Yields the port of F rank 0."""
    port, master = free_ports(ranks), free_ports()
    command = [sys.executable, "-m", "ffn_faas", "serve", str(model), "--port", str(port), "--moe-kernel", kernel]
    command += flags
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def checkpoint(models: Path, arch: str) -> Path:
    make_checkpoint(models / arch, arch)
    return models / arch


@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        *((arch, "eager") for arch in FAMILIES),
        # test_demo has the plain case; these take minutes each.
        *(pytest.param(arch, "compiled", marks=pytest.mark.large) for arch in FAMILIES),
    ],
)
def test_every_token_and_logprob_equals_stock(models: Path, vllms: Nursery, arch: str, mode: str) -> None:
    model = checkpoint(models, arch)
    settings = {**SETTINGS, "model": str(model), "enforce_eager": mode == "eager"}
    asked = {"prompts": prompts(6), "tokens": 48, "logprobs": 5}
    (stock,) = vllms.run({**asked, "settings": settings, "env": {"VLLM_PLUGINS": ""}})
    with vllms.f_rank(model) as (_, port):
        (remote,) = vllms.run({**asked, "settings": settings | attention(port), "env": {}})
    spoken = [tokens for tokens, _ in stock["answers"]]
    assert [len(tokens) for tokens in spoken] == [48] * 6
    assert len({token for tokens in spoken for token in tokens}) >= 20
    assert remote["answers"] == stock["answers"]
    assert sum(nbytes for _, nbytes in stock["layers"]) > 0
    assert sum(nbytes for _, nbytes in remote["layers"]) == 0
    assert [name for name, _ in remote["layers"]] == [name for name, _ in stock["layers"]]


def test_answers_hang_on_the_experts(models: Path, vllms: Nursery) -> None:
    model = checkpoint(models, "qwen3_moe")
    settings = {**SETTINGS, "model": str(model), "enforce_eager": True}
    asked = {"prompts": prompts(6), "tokens": 48}
    (stock,) = vllms.run({**asked, "settings": settings, "env": {"VLLM_PLUGINS": ""}})
    with f_world(model, ranks=1, kernel="zero") as port:
        (control,) = vllms.run({**asked, "settings": settings | attention(port), "env": {}})
    pairs = zip(stock["answers"], control["answers"], strict=True)
    changed = [a != b for (said, _), (without, _) in pairs for a, b in zip(said, without, strict=True)]
    assert len(changed) == 6 * 48
    assert sum(changed) >= 0.5 * len(changed)


def test_attention_is_smaller_than_stock_by_nearly_all_expert_bytes(models: Path, vllms: Nursery) -> None:
    model = checkpoint(models, "qwen3_moe")
    shape = shape_for(1 << 30)
    assert shape.expert_bytes >= 1 << 30
    large = models / "large"
    shutil.copytree(model, large, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(qwen3_moe.config(shape, config["vocab_size"], 0)))
    settings = {**SETTINGS, "model": str(large), "enforce_eager": True}
    asked = {"prompts": prompts(1), "tokens": 2}
    (stock,) = vllms.run({**asked, "settings": {**settings, "load_format": "dummy"}, "env": {"VLLM_PLUGINS": ""}})
    with f_world(large, 1, "zero", "--load-format", "dummy") as port:
        weightless = {**settings, **attention(port), "model_loader_extra_config": {"dummy": True}}
        (remote,) = vllms.run({**asked, "settings": weightless, "env": {}})
    assert sum(nbytes for _, nbytes in stock["layers"]) == shape.expert_bytes
    assert sum(nbytes for _, nbytes in remote["layers"]) == 0
    assert stock["resident_bytes"] - remote["resident_bytes"] >= 0.95 * shape.expert_bytes


@pytest.mark.parametrize("arch", ["qwen3_moe", *FAMILIES])
def test_three_f_ranks_are_about_as_exact_as_stocks_kernel_in_every_layer(models: Path, arch: str) -> None:
    from ffn_faas.demo.layer_errors import layer_errors

    model = checkpoint(models, arch)
    with f_world(model, ranks=3, kernel="auto") as port:
        errors = layer_errors(model, port)
    assert len(errors) in (3, 4)
    assert max(error.ratio for error in errors) <= LARGEST_ERROR_RATIO
    assert all(0 < error.stock_error < 0.02 for error in errors)
