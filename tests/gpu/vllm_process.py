"""Stock vLLM in a process of its own. Argument: a JSON file of what to do; the result goes to its ``out``.

``llm`` are arguments of vllm.LLM, ``afd`` the block of ``--additional-config`` or null, ``alone`` takes the experts
away (results are zeros), ``tokens`` asks for greedy tokens of random prompts one at a time and log-probabilities of the
prompts, ``again`` for them a second time once this file exists, ``for_ever`` again and again once the result is
written, ``tpot`` for the time of an output token at each [batch, context].
"""

import json
import sys
import time
from pathlib import Path

STEPS = 64


def main(task):
    began = time.monotonic()
    from vllm import LLM

    arguments = dict(task["llm"])
    if task.get("afd"):
        arguments |= {
            "load_format": "ffn_faas",
            "additional_config": {"afd": {"role": "attention", "host": "127.0.0.1"} | task["afd"]},
        }
        if task["llm"].get("load_format") == "dummy":
            arguments["model_loader_extra_config"] = {"dummy": True}
    if task.get("alone"):
        take_experts_away()
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, **arguments)
    result = {"start_s": time.monotonic() - began}
    if "tokens" in task:
        result["tokens"] = tokens(llm, **task["tokens"])
    if task.get("again"):
        print("again", flush=True)
        while not Path(task["again"]).exists():
            time.sleep(0.01)
        result["again"] = tokens(llm, **task["tokens"])
    result["tpot_ms"] = {}
    for batch, context in task.get("tpot", []):
        result["tpot_ms"][f"{batch}x{context}"] = tpot(llm, batch, context)
        print(f"TPOT {batch} x {context}: {result['tpot_ms'][f'{batch}x{context}']:.2f} ms", flush=True)
    if task.get("for_ever"):
        Path(task["out"]).write_text(json.dumps(result))
        while True:
            tokens(llm, **task["tokens"])
    return result


def prompt(length, vocabulary, seed):
    import random

    generator = random.Random(seed)
    return {"prompt_token_ids": [generator.randrange(vocabulary) for _ in range(length)]}


def tokens(llm, prompts, length, count, vocabulary):
    """Greedy continuations, one prompt at a time, and what the model thinks of the prompts."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=2, prompt_logprobs=0, detokenize=False
    )
    found = []
    for number in range(prompts):
        request = prompt(length, vocabulary, number)
        output = llm.generate(request, greedy, use_tqdm=False)[0]
        answer = output.outputs[0]
        found.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": [
                    step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
                ],
                "alternatives": [
                    {str(other): seen.logprob for other, seen in step.items()} for step in answer.logprobs
                ],
                "prompt_logprobs": [
                    seen[token].logprob
                    for seen, token in zip(output.prompt_logprobs[1:], request["prompt_token_ids"][1:], strict=True)
                ],
            }
        )
        print(f"prompt {number}: {answer.token_ids[:8]}", flush=True)
    return found


def tpot(llm, batch, context):
    """Milliseconds an output token once all requests decode, over STEPS of them."""
    from vllm import SamplingParams

    limit = SamplingParams(temperature=0, max_tokens=STEPS + 24, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for number in range(batch):
        engine.add_request(f"{batch}-{context}-{number}", prompt(context, 30_000, number), limit)
    generated = {}
    began = first = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            generated[output.request_id] = len(output.outputs[0].token_ids)
        slowest = min(generated.values()) if len(generated) == batch else 0
        if slowest >= 8 and not began:
            began, first = time.perf_counter(), slowest
        if began and slowest >= first + STEPS:
            taken = (time.perf_counter() - began) / (slowest - first)
            engine.abort_request(list(generated))
            while engine.has_unfinished_requests():
                engine.step()
            return taken * 1e3
    return float("nan")


def take_experts_away():
    """What is left when F costs nothing: no session, and answers of zeros."""
    import logging

    from ffn_faas.attention import device_ops, loader

    class Nobody:
        links = ()
        client = None

        def declare_layers(self, names):
            pass

        def wait_ready(self, patience_s):
            pass

        def close(self):
            pass

    class Zeros:
        def dispatch(self, x, weights, ids, layer, part, parts):
            import torch

            return x.new_empty((2,), dtype=torch.int64)

        def combine(self, x, weights, ids, layer, part, parts):
            return x.new_zeros(x.shape)

    def no_session(block, model, attach, log, make_plane=None):
        device_ops.load()
        return loader.Attached(Nobody(), model, 1.0, logging.getLogger("alone"), "m2n")

    def bind(client):
        device_ops._bound = Zeros()

    loader.open_session = no_session
    device_ops.bind = bind


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(asked["out"]).write_text(json.dumps(main(asked)))
