"""A process that has imported vLLM once and forks for every run: the import costs more than a tiny model's answers.

``python -m tests.attention.vllm_nursery``: a request is one JSON line on stdin, a list of runs that go on side by side;
its answer is one line on stdout, the exit status of each. A run has ``settings`` of ``LLM``, ``env``, ``prompts``,
``tokens``, ``logprobs`` (how many tokens at each position, 1 if absent), ``unsliced`` (if true, every rank sends all
rows), ``watch`` (if true, its report has the order of events in the MoE layers) and the path of its ``report``; its log
is beside that.
Workers of vLLM are forks too: its own multi-process executor, without importing everything again in each.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from tests.vllm_models import look_at_classes_in_process

ROOT = Path(__file__).parents[2]
IMPORTED_BY_EVERY_RUN = (
    "compressed_tensors",
    "ffn_faas.attention.compat",
    "ffn_faas.attention.data_plane",
    "ffn_faas.attention.loader",
    "ffn_faas.attention.ops",
    "ffn_faas.connectors.shm_client",
    "ffn_faas.experts.fingerprint",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "websockets.sync.client",
)


class Nursery:
    """The side of the tests.

    A report has the ``answers`` of a run, each its tokens and the log-probabilities at every position; ``layers``, the
    name of each layer of routed experts that the main process holds and the bytes of its weights; the
    ``resident_bytes`` of it after the answers; and the ``cpu_seconds`` that it took.
    """

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self._directory = directory
        self._process = process
        self._runs = 0

    def run(self, *runs: dict[str, Any]) -> list[Any]:
        """The reports of ``runs``, in order, once all of them have ended well. Blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reports = []
        for run in runs:
            self._runs += 1
            reports.append(self._directory / f"run{self._runs}.json")
            run["report"] = str(reports[-1])
        self._process.stdin.write(json.dumps(runs) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        logs = "\n".join(Path(f"{report}.log").read_text(errors="replace")[-6000:] for report in reports)
        assert answer, logs
        assert json.loads(answer) == [0] * len(runs), logs
        return [json.loads(report.read_text()) for report in reports]


@contextmanager
def nursery(env: dict[str, str]) -> Iterator[Nursery]:
    """All that ever came of it is killed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Nursery(Path(directory), process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)


def main() -> None:
    from vllm.v1.executor import multiproc_executor

    for name in IMPORTED_BY_EVERY_RUN:
        importlib.import_module(name)
    from torch._inductor.codecache import CacheBase

    CacheBase.get_system()  # hashes all of Triton, once for all forks
    gc.collect()
    gc.freeze()  # no fork looks through what all of them share
    look_at_classes_in_process()
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    for line in sys.stdin:
        children = []
        for run in json.loads(line):
            child = os.fork()
            if child == 0:
                _run(run)
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _run(run: dict[str, Any]) -> None:
    log = os.open(run["report"] + ".log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(run["env"])
    if run.get("unsliced"):
        _send_all_rows()
    import torch
    from vllm import LLM, SamplingParams

    # Eager vLLM still compiles how it ranks log-probabilities, which takes longer than all the rest.
    torch._dynamo.config.disable = run["settings"]["enforce_eager"]
    llm = LLM(**run["settings"])
    best = run.get("logprobs", 1)
    sampling = SamplingParams(temperature=0, max_tokens=run["tokens"], logprobs=best, ignore_eos=True)
    answers, events = [], list[str]()
    with _watched(llm, events) if run.get("watch") else nullcontext():
        for prompt in run["prompts"]:
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
            logprobs = [{token: entry.logprob for token, entry in position.items()} for position in output.logprobs]
            answers.append([list(output.token_ids), logprobs])
    layers = [] if len(multiprocessing.active_children()) else llm.apply_model(_routed_experts)[0]
    resident_bytes = psutil.Process().memory_info().rss
    llm.llm_engine.engine_core.shutdown()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    report = {
        "answers": answers,
        "layers": layers,
        "events": events,
        "resident_bytes": resident_bytes,
        "cpu_seconds": seconds,
    }
    Path(run["report"]).write_text(json.dumps(report))


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


if __name__ == "__main__":
    main()
