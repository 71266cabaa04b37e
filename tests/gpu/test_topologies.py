"""Several stock vLLM in front of several F ranks: 1A3F, 3A1F, 2A2F. On four GPUs each has one of its own.

On fewer they share: the same processes, windows and splits (43/43/42 experts), in turns.
"""

import json
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest

from tests.gpu.conftest import DEVICES
from tests.gpu.logprob_gaps import gap
from tests.gpu.vllm_checkpoint import CONFIG, VOCABULARY, make_checkpoint
from tests.gpu.vllm_runs import PORT, F, finish, llm, start_vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.topologies,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs, and four for times"),
    pytest.mark.timeout(900),
]
TOKENS = {"prompts": 8, "length": 256, "count": 48, "vocabulary": VOCABULARY}
AFD = {"port": PORT, "connector_extra_config": {"reattach_timeout_s": 100}}
TENSOR = "tensor_parallel_size"
SIZES = [[128, 256], [256, 256]]


@dataclass
class Topology:
    """GPUs of Attention processes, each a rank of its own or of one data parallel vLLM, and of F ranks."""

    attentions: tuple[int, ...]
    services: tuple[int, ...]
    options: dict = field(default_factory=dict)
    data_parallel: bool = False

    @contextmanager
    def running(self, folder, model, *flags, **task):
        """(F, its Attention processes by name); F is stopped, and has to end cleanly."""
        f = F(model, folder / "f.log", *flags, devices=tuple(str(gpu % len(DEVICES)) for gpu in self.services))
        task["llm"] |= self.options
        processes = {}
        try:
            f.start()
            for number in range(len(self.attentions)):
                name = f"a{number}"
                processes[name] = start_vllm(folder, name, *self._place(number), afd=AFD, **task)
            yield f, processes
            f.stop()
        finally:
            for process in processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            f.kill()

    def _place(self, number):
        """Which GPUs it sees, its own first: F's must be visible too. vLLM counts on by itself in data parallel."""
        order = list(range(len(DEVICES)))
        own = self.attentions[number] % len(DEVICES)
        if not self.data_parallel:
            return ",".join(map(str, order[own:] + order[:own])), None
        rank, size = str(number), str(len(self.attentions))
        settings = {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": size}
        return ",".join(map(str, order)), settings | {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": "8361"}


TOPOLOGIES = {
    "1A3F": Topology((0,), (1, 2, 3)),
    "3A1F": Topology((0, 1, 2), (3,)),
    "2A2F-tensor-parallel": Topology((0,), (2, 3), {TENSOR: 2}),
    "2A2F-data-parallel": Topology((0, 1), (2, 3), data_parallel=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    """What local experts say, compiled and eager, and compiled with attention in two parts, which sum differently."""
    folder = tmp_path_factory.mktemp("stock")
    ways = {"stock": ("0", {}), "stock-eager": ("1", {"enforce_eager": True}), "stock-tp2": ("0,1", {TENSOR: 2})}
    running = {
        name: start_vllm(folder, name, gpus, llm=llm(model, **options), tokens=TOKENS)
        for name, (gpus, options) in ways.items()
    }
    return {name: finish(folder, name, process)["tokens"] for name, process in running.items()}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_attention_says_what_stock_says(model, stock, tmp_path, record_property, name):
    with TOPOLOGIES[name].running(tmp_path, model, llm=llm(model), tokens=TOKENS) as (_, processes):
        said = {name: finish(tmp_path, name, process)["tokens"] for name, process in processes.items()}
    between_stock = gap(stock["stock"], stock["stock-eager"])
    like = stock["stock-tp2" if TENSOR in TOPOLOGIES[name].options else "stock"]
    found = {name: gap(tokens, like) for name, tokens in said.items()}
    record_property("gaps", json.dumps(found | {"stock to stock-eager": between_stock}))
    for one in found.values():
        for limit in ("prompt_rms", "prompt_p999", "prompt_max", "token_rms", "token_max"):
            assert one[limit] <= 1.1 * between_stock[limit], (name, limit, found, between_stock)


def test_one_of_three_attentions_is_killed_and_the_others_lose_nothing(model, stock, tmp_path, record_property):
    with TOPOLOGIES["3A1F"].running(tmp_path, model, llm=llm(model), tokens=TOKENS) as (f, processes):
        killed = processes.pop("a1")
        log = tmp_path / "a1.log"
        while "prompt 2" not in log.read_text():
            assert killed.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        said = {name: finish(tmp_path, name, process)["tokens"] for name, process in processes.items()}
        assert f.is_ready()
    between_stock = gap(stock["stock"], stock["stock-eager"])
    for name, tokens in said.items():
        assert [len(one["tokens"]) for one in tokens] == [TOKENS["count"]] * TOKENS["prompts"]
        found = gap(tokens, stock["stock"])
        record_property(f"gap_{name}", json.dumps(found))
        assert found["prompt_max"] <= 1.1 * between_stock["prompt_max"]


@pytest.mark.quiet
@pytest.mark.skipif(len(DEVICES) < 4, reason="needs four GPUs: times of ranks that have one each")
@pytest.mark.parametrize("name", [*TOPOLOGIES, "stock-tp4", "stock-dp4"])
def test_time_of_an_output_token_on_four_gpus(tmp_path, record_property, name):
    """Figures for docs/performance.md, not limits: the full shape with dummy weights, each batch in every vLLM."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 48, "vocab_size": 151_936}))
    full = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 256}
    full |= {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9, "dtype": "bfloat16"}
    if name in TOPOLOGIES:
        with TOPOLOGIES[name].running(tmp_path, tmp_path, "--load-format", "dummy", llm=full, tpot=SIZES) as running:
            f, processes = running
            found = {name: finish(tmp_path, name, process)["tpot_ms"] for name, process in processes.items()}
            print(f.metrics())
    else:
        full["enable_expert_parallel"] = True
        size = 1 if name == "stock-tp4" else 4
        full["tensor_parallel_size"] = 4 // size
        places = Topology(tuple(range(size)), (), data_parallel=size > 1)
        processes = {
            f"s{number}": start_vllm(tmp_path, f"s{number}", *places._place(number), llm=full, tpot=SIZES)
            for number in range(size)
        }
        found = {name: finish(tmp_path, name, process)["tpot_ms"] for name, process in processes.items()}
    tokens = {
        size: sum(int(size.split("x")[0]) / one[size] * 1e3 for one in found.values()) / 4
        for size in next(iter(found.values()))
    }
    record_property("tpot_ms", json.dumps(found))
    record_property("tokens_per_second_and_gpu", json.dumps(tokens))
    print(name, found, tokens, flush=True)
