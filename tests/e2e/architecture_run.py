"""Run as ``python -m tests.e2e.architecture_run MODEL_DIR F_PORT eager|compiled``: stock vLLM, then Attention of F.

Both in this process, one after the other, so that vLLM is imported once; vLLM's own log goes to stderr. Prints one JSON
object: for each of the two every prompt's greedy tokens with the log-probabilities of the best five at each position,
for Attention also its remote layers and the bytes that they hold.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from ffn_faas.demo.corpus import prompts

PROMPTS, TOKENS = 6, 48


def main(model: str, port: int, mode: str) -> None:
    settings = {
        "model": model,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "seed": 0,
        "enforce_eager": mode == "eager",
    }
    stock = _run(settings)
    block = {"afd": {"role": "attention", "host": "127.0.0.1", "port": port}}
    attention = _run({**settings, "load_format": "ffn_faas", "additional_config": block})
    print(json.dumps({"stock": stock, "attention": attention}), flush=True)


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
    """(name, class, bytes of weights) of each layer of routed experts."""
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
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
