"""Run as ``python -m tests.e2e.architecture_run``: stock vLLM, then Attention of F, for each request on stdin.

A request is one JSON line (model, port of F, mode: eager or compiled), its answer one line on stdout that begins with
RESULT; vLLM's own log goes to stderr. All in one process, so that vLLM is imported once. The answer has, for stock and
for attention, every prompt's greedy tokens with the log-probabilities of the best five at each position, and the layers
of routed experts with the bytes that they hold; or an error.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from typing import Any

from ffn_faas.demo.corpus import prompts

PROMPTS, TOKENS = 6, 48


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _compare(request["model"], request["port"], request["mode"])
        except BaseException:  # noqa: BLE001 - whatever vLLM raises is the answer
            answer = {"error": traceback.format_exc()}
        print("RESULT " + json.dumps(answer), flush=True)


def _compare(model: str, port: int, mode: str) -> dict[str, Any]:
    settings = {
        "model": model,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "seed": 0,
        "enforce_eager": mode == "eager",
    }
    block = {"afd": {"role": "attention", "host": "127.0.0.1", "port": port}}
    stock = _run(settings)
    return {
        "stock": stock,
        "attention": _run({**settings, "load_format": "ffn_faas", "additional_config": block}),
    }


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
    answers = []
    for prompt in prompts(PROMPTS):
        output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        logprobs = [{str(token): entry.logprob for token, entry in position.items()} for position in output.logprobs]
        answers.append({"tokens": list(output.token_ids), "logprobs": logprobs})
    layers = llm.apply_model(_routed_experts)[0]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return {"answers": answers, "layers": layers}


def _routed_experts(model: Any) -> list[tuple[str, str, int]]:
    """(name, class, bytes of expert weights) of each layer of routed experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return [
        (
            layer.layer_name,
            type(layer).__name__,
            sum(weight.nbytes for name, weight in layer.named_parameters() if name != "e_score_correction_bias"),
        )
        for layer in model.modules()
        if isinstance(layer, RoutedExperts)
    ]


if __name__ == "__main__":
    main()
