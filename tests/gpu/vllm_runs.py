"""Stock vLLM and the daemon as processes of the GPU suite."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.gpu.conftest import A_GPU

PORT = 10 + int(os.environ.get("GPU_TEST_PORT", "8311"))


def as_a_user_has_it():
    return {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}


def start_vllm(folder, name, gpus=None, settings=None, **task):
    """A vLLM process; its output goes to ``folder``/name.log. ``settings``: of its environment."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(task | {"out": str(folder / f"{name}.out.json")}))
    environment = as_a_user_has_it() | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"} | (settings or {})
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.gpu.vllm_process", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def finish(folder, name, process):
    code = process.wait(timeout=500)
    assert code == 0, (folder / f"{name}.log").read_text()[-6000:]
    return json.loads((folder / f"{name}.out.json").read_text())


class F:
    """The daemon, a rank on each of ``devices``; without them on the last GPU."""

    def __init__(self, model, log, *flags, devices=(A_GPU,)):
        self.command = [sys.executable, "-u", "-m", "ffn_faas", "serve", str(model), "--backend", "gpu-deepep-m2n"]
        self.command += ["--device-ids", ",".join(devices), "--port", str(PORT)]
        # Ranks share the GPU, on a machine with one also with Attention, and with daemons of tests that run beside.
        self.command += ["--max-num-batched-tokens", "4096", "--share-device", *flags]
        self.log, self.ranks = log, len(devices)
        self.ready_s = 0.0
        self.processes = []

    def start(self):
        began = time.monotonic()
        size = str(self.ranks)
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size} if self.ranks > 1 else {}
        with self.log.open("a") as log:
            self.processes = [
                subprocess.Popen(
                    self.command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=as_a_user_has_it() | world | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}),
                )
                for rank in range(self.ranks)
            ]
        ready = False
        while not ready:
            ready = self.is_ready()  # asked first: another daemon on this port would answer, and ours end
            assert all(process.poll() is None for process in self.processes), self.log.read_text()[-4000:]
            assert time.monotonic() < began + 200
            time.sleep(0.05)
        self.ready_s = time.monotonic() - began
        return self

    def is_ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
            return answer.read().decode()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def stop(self):
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            assert process.wait(timeout=30) == 0, self.log.read_text()[-4000:]


def llm(model, **more):
    return {
        "model": str(model),
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 4 << 30,  # free memory is no measure where others start on the same GPU
        "dtype": "bfloat16",
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64]},
        **more,
    }
