"""A + F beside stock vLLM on the same cores: decode speed in brackets, what an idle F costs, how fast F is ready.

python -m tests.bench.whole_system --size 1GiB --concurrency 1,8,32 --moe-kernel vllm

Both deployments are up all the time and take turns; OMP waits are passive on all sides, so that threads of the one
that rests leave the cores to the other. Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from ffn_faas.bench import replay
from ffn_faas.demo import checkpoint, commands
from ffn_faas.demo.corpus import prompts
from ffn_faas.demo.ports import free_ports
from ffn_faas.demo.processes import Child, Children
from ffn_faas.demo.progress import report_bytes, say, wait_ready
from ffn_faas.units import parse_size

IDLE_S = 30.0
TIMEOUT_S = 900.0
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--concurrency", type=lambda text: [int(item) for item in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--moe-kernel", default="vllm")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--brackets", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Children() as children:
        print(json.dumps(measure(options, Path(directory), children)))


def measure(options: argparse.Namespace, directory: Path, children: Children) -> dict[str, Any]:
    model = directory / "model"
    checkpoint.make_checkpoint(model, "qwen3_moe", options.size, report=report_bytes("checkpoint"))
    ports = [free_ports() for _ in range(3)]
    read_s = _read(model)

    def start(name: str, command: commands.Command, extra: list[str], port: int, path: str) -> tuple[Child, float]:
        child = children.start(name, [*command.arguments, *extra], command.environment | PASSIVE, directory / name)
        return child, wait_ready(children, child, port, path, TIMEOUT_S)

    f, ready_s = start("F", commands.ffn(model, ports[0], 1, options.moe_kernel, 0), [], ports[0], "/ready")
    many = ["--max-num-seqs", str(max(options.concurrency))]
    served = commands.attention(model, ports[1], ports[0], options.compiled, directory / "cache")
    start("Attention", served, many, ports[1], "/health")
    stock = commands.stock(model, ports[2], options.compiled, directory / "cache")
    start("stock", stock, many, ports[2], "/health")
    urls = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    result: dict[str, Any] = {"moe_kernel": options.moe_kernel, "compiled": options.compiled, "decode": []}
    result |= {"read_s": read_s, "f_ready_s": ready_s, "expert_bytes": checkpoint.expert_bytes(model)}
    result["idle_f_of_a_core"] = _share(f)
    for concurrency in options.concurrency:
        texts = prompts(6)
        asked = [
            {
                "prompt": texts[number % len(texts)],
                "max_tokens": options.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for number in range(max(4, concurrency))
        ]
        compared = replay.run(asked, urls, [concurrency], options.brackets)
        say(replay.print_table(compared))
        result["decode"] += compared["rows"]
    return result


def _read(model: Path) -> float:
    """Seconds to read the checkpoint's files once, from the page cache as F will."""
    for _ in range(2):
        began = time.monotonic()
        for file in model.glob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                buffer = bytearray(1 << 24)
                while stream.readinto(buffer):
                    pass
    return time.monotonic() - began


def _share(child: Child) -> float:
    """Of one core, that a process with an attached but silent Attention takes."""
    process = psutil.Process(child.pid)

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    time.sleep(5)
    before = used()
    time.sleep(IDLE_S)
    return (used() - before) / IDLE_S


if __name__ == "__main__":
    main()
