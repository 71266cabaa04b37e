"""Stock vLLM with its experts on another GPU: log-probabilities beside two stock runs with different kernels.

Where there is only one GPU they share it, and processes take turns.
"""

import json
import os
import signal
import time
from importlib.util import find_spec

import pytest

from tests.gpu.conftest import A_GPU, DEVICES
from tests.gpu.logprob_gaps import gap
from tests.gpu.vllm_checkpoint import CONFIG, VOCABULARY, make_checkpoint
from tests.gpu.vllm_runs import PORT, F, finish, llm, start_vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]
TOKENS = {"prompts": 6, "length": 96, "count": 48, "vocabulary": VOCABULARY}
LONG = {"length": 256}
MANY = TOKENS | LONG | {"prompts": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory)
    return directory


def test_remote_experts_differ_from_stock_no_more_than_stock_kernels_do(model, tmp_path, record_property):
    """All four processes at once: what takes longest is their start."""
    afd = {"port": PORT, "connector_extra_config": {"reattach_timeout_s": 100}}
    eager = {"enforce_eager": True}
    running = {
        "stock": start_vllm(tmp_path, "stock", "0", llm=llm(model), tokens=MANY),
        "stock-eager": start_vllm(tmp_path, "stock-eager", A_GPU, llm=llm(model, **eager), tokens=MANY),
    }
    f = F(model, tmp_path / "f.log").start()
    running |= {
        "graphs": start_vllm(tmp_path, "graphs", llm=llm(model), afd=afd, tokens=MANY),
        "eager": start_vllm(tmp_path, "eager", llm=llm(model, **eager), afd=afd, tokens=MANY),
    }
    remote = {name: finish(tmp_path, name, process)["tokens"] for name, process in running.items()}
    stock = {name: remote.pop(name) for name in ("stock", "stock-eager")}
    metrics = f.metrics()
    f.stop()
    both = F(model, tmp_path / "both.log", devices=(A_GPU, A_GPU)).start()
    process = start_vllm(tmp_path, "two-ranks", llm=llm(model), afd=afd, tokens=TOKENS | LONG)
    remote["two-ranks"] = finish(tmp_path, "two-ranks", process)["tokens"]
    both.stop()
    between_stock = gap(stock["stock"], stock["stock-eager"])
    found = {"stock to stock-eager": between_stock}
    for name, run in remote.items():
        found |= {f"{name} to {other}": gap(run, stock[other][: len(run)]) for other in stock}
    print(json.dumps(found, indent=1))
    print(metrics)
    record_property("gaps", json.dumps(found))
    for name, other in (("graphs", "stock"), ("eager", "stock-eager"), ("two-ranks", "stock")):
        ours = found[f"{name} to {other}"]
        for limit in ("prompt_rms", "prompt_p999", "prompt_max", "token_rms", "token_max"):
            assert ours[limit] <= 1.1 * between_stock[limit], (name, limit, found)


def wait_for_line(logs, text, count=1, timeout_s=200.0):
    """Until one of them has it ``count`` times."""
    deadline = time.monotonic() + timeout_s
    while max(log.read_text().count(text) for log in logs) < count:
        assert time.monotonic() < deadline, logs[0].read_text()[-4000:]
        time.sleep(0.01)


def test_f_killed_under_vllm_changes_no_token_and_vllm_killed_leaves_f_serving_the_next(model, tmp_path):
    """Greedy tokens twice in each process; F dies twice during the second time. Then vLLM dies while it generates."""
    afd = {"port": PORT, "connector_extra_config": {"reattach_timeout_s": 100}}
    asked = TOKENS | {"count": 300}
    f = F(model, tmp_path / "f.log").start()
    ways = {"graphs": {}, "eager": {"enforce_eager": True}}
    running = {
        name: start_vllm(
            tmp_path,
            name,
            llm=llm(model, **options),
            afd=afd,
            tokens=asked,
            again=str(tmp_path / "again"),
            for_ever=True,
        )
        for name, options in ways.items()
    }
    logs = [tmp_path / f"{name}.log" for name in running]
    try:
        for log in logs:
            wait_for_line([log], "again")
        (tmp_path / "again").touch()
        for death in range(2):
            wait_for_line(logs, "prompt ", asked["prompts"] + 1 + 2 * death)
            time.sleep(0.1)
            f.kill()
            f.start()
        for name, process in running.items():
            while not (tmp_path / f"{name}.out.json").exists():
                assert process.poll() is None, (tmp_path / f"{name}.log").read_text()[-4000:]
                time.sleep(0.05)
        time.sleep(0.5)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for name in running:
        result = json.loads((tmp_path / f"{name}.out.json").read_text())
        assert (tmp_path / f"{name}.log").read_text().count("F is back after") == 2
        assert [run["tokens"] for run in result["tokens"]] == [run["tokens"] for run in result["again"]]
    assert f.is_ready()
    f.stop()


@pytest.mark.quiet
@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs: times of an F and an Attention that have one each")
def test_time_of_an_output_token_beside_stock(tmp_path, record_property):
    """Figures for docs/performance.md, not limits: the full shape with dummy weights, [batch, context]."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 48, "vocab_size": 151_936}))
    full = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "max_model_len": 9216,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.9,
        "dtype": "bfloat16",
    }
    sizes = [[128, 256], [256, 256], [512, 256], [64, 8192]]
    f = F(tmp_path, tmp_path / "f.log", "--load-format", "dummy").start()
    record_property("f_ready_s", round(f.ready_s, 1))
    remote = start_vllm(tmp_path, "remote", llm=full, afd={"port": PORT}, tpot=sizes)
    found = {}

    def note(name, process):
        found[name] = {size: round(value, 2) for size, value in finish(tmp_path, name, process)["tpot_ms"].items()}
        record_property(f"tpot_ms_{name}", json.dumps(found[name]))
        print(name, found[name], flush=True)

    note("remote", remote)
    print(f.metrics())
    f.stop()
    alone = start_vllm(tmp_path, "alone", "0", llm=full, afd={"port": PORT}, alone=True, tpot=sizes)
    stock = start_vllm(tmp_path, "stock", "1", llm=full, tpot=sizes)
    note("alone", alone)
    note("stock", stock)
    both = full | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    note("stock-tp2", start_vllm(tmp_path, "stock-tp2", llm=both, tpot=sizes))
    assert set(found) == {"remote", "alone", "stock", "stock-tp2"}
