"""Every parallel form of Attention against stock vLLM: greedy tokens and log-probabilities, one prompt at a time.

All runs cut prompts into chunks of an odd number of rows, find the second prompt's beginning in the prefix cache, and
dispatch through windows smaller than a chunk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.checkpoint import make_checkpoint
from ffn_faas.demo.ports import free_ports

from .vllm_nursery import Nursery
from .vllm_process import attention

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("torch")

LONG = "When the sun sets behind the hills, the river turns to gold and the boats come home one by one. "
PROMPTS = ["The sea is", LONG, LONG + "Then"]
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 15,
    "max_num_seqs": 1,
    "enable_prefix_caching": True,
    "block_size": 32,
    "enforce_eager": True,
    "seed": 0,
    "kv_cache_memory_bytes": 32 << 20,
}
ANY_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM gives each tensor or pipeline parallel rank a NUMA node of its own, and refuses more ranks than nodes."""
NO_PLUGIN = {"VLLM_PLUGINS": ""}
SMALL_WINDOWS = {"connector_extra_config": {"capacity": 4}}
FEW, MANY = 4, 12
EAGER: dict[str, Any] = {}
COMPILED: dict[str, Any] = {"enforce_eager": False}
UNCOMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 1}, "uncompiled": True}
"""Runs the warm-up that makes what pipeline ranks hand over, which an eager vLLM on a CPU leaves out."""
EITHER_MODE = pytest.mark.parametrize(
    "mode", [pytest.param(EAGER, id="eager"), pytest.param(COMPILED, id="compiled", marks=pytest.mark.large)]
)
TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
EP = {"enable_expert_parallel": True}
Answers = list[Any]
"""(tokens, log-probabilities) of each prompt."""
Stock = Callable[..., Answers]


@pytest.fixture(scope="module")
def stock(vllms: Nursery, model: Path) -> Stock:
    """What stock vLLM answers in a form; every form is asked once."""

    @cache
    def ask(settings: str) -> Answers:
        (report,) = vllms.run(request(model, MANY, json.loads(settings), NO_PLUGIN))
        return answers(report)

    return lambda **settings: ask(json.dumps(settings, sort_keys=True))


@pytest.fixture(scope="module")
def f_port(vllms: Nursery, model: Path) -> Iterator[int]:
    with vllms.f_rank(model) as (_, port):
        yield port


@pytest.fixture(scope="module")
def sharded_f_port(vllms: Nursery, model: Path) -> Iterator[int]:
    """Its experts are computed as stock's two tensor parallel ranks do, each half rounded to bfloat16."""
    with vllms.f_rank(model, main="tests.attention.sharded_f:main") as (_, port):
        yield port


def request(
    model: Path, tokens: int, settings: dict[str, Any], env: dict[str, str], prompts: list[str] | None = None
) -> dict[str, Any]:
    merged = {**SETTINGS, **settings, "model": str(model)}
    how = {"uncompiled": merged.pop("uncompiled", False)}
    return {"settings": merged, "env": {**ANY_CORE, **env}, "prompts": prompts or PROMPTS, "tokens": tokens, **how}


def remote(vllms: Nursery, model: Path, port: int, ranks: int, unsliced: bool = False, **settings: Any) -> Answers:
    """Answers of Attention with all its experts at ``port``."""
    block = attention(port, num_attention_ranks=ranks, **SMALL_WINDOWS)
    (report,) = vllms.run({**request(model, MANY, {**settings, **block}, {}), "unsliced": unsliced})
    return answers(report)


def data_parallel(vllms: Nursery, model: Path, port: int, ranks: int, **settings: Any) -> list[Answers]:
    """Answers of two data parallel ranks; the second one ends each prompt early and then runs dummy steps."""
    world = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": str(free_ports())}
    block = attention(port, num_attention_ranks=ranks, **SMALL_WINDOWS)
    runs = [
        request(model, tokens, {**settings, **block}, {**world, "VLLM_DP_RANK": str(rank)})
        for rank, tokens in enumerate((MANY, FEW))
    ]
    return [answers(report) for report in vllms.run(*runs)]


def answers(report: Any) -> Answers:
    found: Answers = report["answers"]
    return found


def beginnings(stock: Answers) -> Answers:
    return [[tokens[:FEW], logprobs[:FEW]] for tokens, logprobs in stock]


@EITHER_MODE
def test_uneven_data_parallel_ranks_answer_as_one_rank_does(
    vllms: Nursery, model: Path, f_port: int, stock: Stock, mode: dict[str, Any]
) -> None:
    busy, idle = data_parallel(vllms, model, f_port, 2, **mode)
    assert busy == stock(**mode)
    assert idle == beginnings(stock(**mode))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(UNCOMPILED, id="uncompiled"),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.large),
    ],
)
def test_pipeline_parallel_ranks_serve_the_layers_they_built(
    vllms: Nursery, model: Path, f_port: int, stock: Stock, mode: dict[str, Any]
) -> None:
    assert remote(vllms, model, f_port, 2, **PP2, **mode) == stock(**PP2, **mode)


@EITHER_MODE
def test_tensor_parallel_ranks_that_send_their_slices_answer_as_stock_does(
    vllms: Nursery, model: Path, sharded_f_port: int, stock: Stock, mode: dict[str, Any]
) -> None:
    assert remote(vllms, model, sharded_f_port, 2, **TP2, **mode) == stock(**TP2, **mode)


@pytest.mark.large
def test_tensor_parallel_ranks_that_all_send_all_rows_answer_the_same(
    vllms: Nursery, model: Path, sharded_f_port: int, stock: Stock
) -> None:
    assert remote(vllms, model, sharded_f_port, 2, unsliced=True, **TP2) == stock(**TP2)


@pytest.mark.parametrize(
    "expert_parallel",
    [pytest.param({}, id="all_rows", marks=pytest.mark.large), pytest.param(EP, id="sequence_parallel")],
)
def test_data_and_tensor_parallel_together(
    vllms: Nursery, model: Path, sharded_f_port: int, stock: Stock, expert_parallel: dict[str, Any]
) -> None:
    busy, idle = data_parallel(vllms, model, sharded_f_port, 4, **TP2, **expert_parallel)
    assert busy == stock(**TP2)
    assert idle == beginnings(stock(**TP2))


def test_shared_experts_compute_while_f_does(vllms: Nursery, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("shared") / "qwen2_moe"
    layers = make_checkpoint(model, "qwen2_moe").layers
    alone = request(model, MANY, {}, NO_PLUGIN)
    (stock,) = vllms.run(alone)
    with vllms.f_rank(model) as (_, port):
        (remote,) = vllms.run({**request(model, MANY, attention(port), {}), "watch": True})
    assert remote["answers"] == stock["answers"]
    events = remote["events"]
    assert len(events) >= 3 * layers * MANY
    assert events == ["dispatch", "shared experts", "combine"] * (len(events) // 3)
