"""Parallel forms of Attention against stock vLLM: greedy tokens and log-probabilities, one prompt at a time.

All runs cut prompts into chunks of an odd number of rows, find the second prompt's beginning in the prefix cache, and
dispatch through windows smaller than a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ffn_faas.demo.ports import free_ports

from .vllm_process import answers, attention, environment, f_rank, vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("torch")

LONG = "When the sun sets behind the hills, the river turns to gold and the boats come home one by one. "
SETTINGS: dict[str, Any] = {
    "prompts": ["The sea is", LONG, LONG + "Then"],
    "max_model_len": 256,
    "max_num_batched_tokens": 15,
    "max_num_seqs": 1,
    "enable_prefix_caching": True,
    "block_size": 32,
    "enforce_eager": True,
}
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""vLLM gives each tensor or pipeline parallel rank a NUMA node of its own, and refuses more ranks than nodes."""
SMALL_WINDOWS = {"connector_extra_config": {"capacity": 4}}
FEW, MANY = 4, 12


@pytest.fixture(scope="module")
def stock(model: Path) -> list[Any]:
    return stock_of(model)


@pytest.fixture(scope="module")
def f_port(model: Path) -> Iterator[int]:
    with f_rank(model, "--moe-kernel", "vllm") as (_, port):
        yield port


def stock_of(model: Path, **settings: Any) -> list[Any]:
    with vllm(model, environment(**ONE_THREAD, VLLM_PLUGINS=""), MANY, **{**SETTINGS, **settings}) as process:
        return answers(process)


def data_parallel(model: Path, port: int, ranks: int, **settings: Any) -> list[list[Any]]:
    """Answers of two data parallel ranks; the second one ends each prompt early and then runs dummy steps."""
    master = str(free_ports())
    block = attention(port, num_attention_ranks=ranks, **SMALL_WINDOWS)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                vllm(
                    model,
                    environment(**ONE_THREAD, VLLM_DP_RANK=str(rank), VLLM_DP_SIZE="2", VLLM_DP_MASTER_PORT=master),
                    tokens,
                    **{**SETTINGS, **settings},
                    **block,
                )
            )
            for rank, tokens in enumerate((MANY, FEW))
        ]
        return [answers(process) for process in processes]


def test_uneven_data_parallel_ranks_answer_as_one_rank_does(model: Path, f_port: int, stock: list[Any]) -> None:
    busy, idle = data_parallel(model, f_port, 2)
    assert busy == stock
    assert idle == beginnings(stock)


def beginnings(stock: list[Any]) -> list[Any]:
    return [[tokens[:FEW], logprobs[:FEW]] for tokens, logprobs in stock]
