"""What a child of the nursery does with vLLM: answers prompts, or configures itself and says what was refused."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil


def run(
    settings: dict[str, Any],
    prompts: list[str],
    tokens: int,
    logprobs: int = 1,
    unsliced: bool = False,
    watch: bool = False,
    uncompiled: bool = False,
) -> dict[str, Any]:
    """``LLM(**settings)`` answers ``prompts``, one at a time, with ``logprobs`` tokens' at each position.

    With ``unsliced`` every rank sends all rows; ``watch`` reports the order of events in the MoE layers; with
    ``uncompiled`` a vLLM that is not eager does all that it does then, but torch.compile changes nothing.
    Returns the ``answers``, each its tokens and the log-probabilities at every position; ``layers``, the name of each
    layer of routed experts that this process holds and the bytes of its weights; its ``resident_bytes`` after the
    answers; and the ``cpu_seconds`` that it took.
    """
    if unsliced:
        _send_all_rows()
    import torch
    from vllm import LLM, SamplingParams

    # Eager vLLM still compiles how it ranks log-probabilities, which takes longer than all the rest.
    torch._dynamo.config.disable = settings["enforce_eager"] or uncompiled
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=logprobs, ignore_eos=True)
    answers, events = [], list[str]()
    with _watched(llm, events) if watch else nullcontext():
        for prompt in prompts:
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
            positions = [{token: entry.logprob for token, entry in position.items()} for position in output.logprobs]
            answers.append([list(output.token_ids), positions])
    layers = [] if len(multiprocessing.active_children()) else llm.apply_model(_routed_experts)[0]
    resident_bytes = psutil.Process().memory_info().rss
    llm.llm_engine.engine_core.shutdown()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "answers": answers,
        "layers": layers,
        "events": events,
        "resident_bytes": resident_bytes,
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in used),
    }


def refusals(model: str, cases: dict[str, dict[str, Any]], pretended_version: str = "") -> dict[str, str]:
    """Why a vLLM of ``pretended_version``, if any, does not load ``model`` with the settings of each case."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from ffn_faas.attention import compat

    if pretended_version:
        compat.vllm_version = lambda: pretended_version

    def reason_of(settings: dict[str, Any]) -> str:
        try:
            config = EngineArgs(**settings).create_engine_config()
        except Exception as error:  # noqa: BLE001 - whatever it is, is the answer
            return f"vllm: {error}"
        try:
            with set_current_vllm_config(config):
                get_model_loader(config.load_config).load_model(config, config.model_config)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return "no refusal"

    base = {"model": model, "max_model_len": 128, "enforce_eager": True}
    return {name: reason_of({**base, **case}) for name, case in cases.items()}


def compile_cache_keys(model: str, cases: list[dict[str, Any]]) -> list[str]:
    """The key of vLLM's compile cache with the settings of each case."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.engine.arg_utils import EngineArgs

    return [str(aot_compile_hash_factors(EngineArgs(model=model, **case).create_engine_config())) for case in cases]


def _routed_experts(model: Any) -> list[tuple[str, int]]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return [
        (
            layer.layer_name,
            sum(weight.nbytes for name, weight in layer.named_parameters() if name != "e_score_correction_bias"),
        )
        for layer in model.modules()
        if isinstance(layer, RoutedExperts)
    ]


@contextmanager
def _watched(llm: Any, events: list[str]) -> Iterator[None]:
    """While it lasts ``events`` gets our ops by name and ``shared experts`` at each begin; one rank, eager."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "ffn_faas":
                events.append(func.name().partition("::")[2])
            return func(*args, **(kwargs or {}))

    def hook(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(".shared_expert"):
                module.register_forward_pre_hook(lambda *_: events.append("shared experts"))

    llm.apply_model(hook)
    with Ops():
        yield


def _send_all_rows() -> None:
    """Every tensor parallel rank sends all rows of its batch to F, none a slice."""
    from ffn_faas.attention.compat import ranks
    from ffn_faas.attention.remote_experts import Rows

    ranks.rows_of_rank = lambda moe_config: Rows()
