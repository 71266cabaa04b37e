"""Whole A + F systems of real processes over the operators, and what the oracle says each A rank must get back.

Over the twin unless ``System.npu`` says that each rank has an NPU of its own and the real operators.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from ffn_faas.ascend import twin
from ffn_faas.ascend.numerics import int4, scales
from ffn_faas.ascend.op_module import OpModule, real_module
from ffn_faas.ascend.shape import CamShape
from tests.cam import oracle
from tests.cam.twin import calls
from tests.cam.twin.calls import Sizes

INTER = 32
STUCK = 124
"""Exit code of a rank that was still blocked at its limit: nothing can cancel a dispatch receive."""
FRACTAL_NZ = 29
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "tests.cam.twin.calls"])


@dataclass(frozen=True)
class System:
    """``experts``: "identity", "int4" or "int8". ``rows``: of a receive buffer; few of them make several chunks."""

    sizes: Sizes
    layers: int = 4
    experts: str = "identity"
    rows: int = 262
    seed: int = 1
    sparse: bool = False  # every token chooses among the experts of the first F rank
    npu: bool = False
    limit_s: float = 50.0  # of each process

    def inputs(self, rank: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Batches differ by rank and layer, one row and the most rows among them."""
        most = self.sizes.most_batch
        batch = (1, most, 2, most // 2)[(rank + layer) % 4]
        chosen = range(self.sizes.experts) if self.sparse else None
        return calls.inputs(self.sizes, batch, 1000 * self.seed + 10 * layer + rank, chosen)

    def expected(self, rank: int) -> list[torch.Tensor]:
        quantized = {"int4": int4_experts, "int8": int8_experts}.get(self.experts)

        def expert(layer: int, number: int, rows: np.ndarray | oracle.Quantized) -> np.ndarray:
            if quantized is None:
                return oracle.identity_like(layer, number, rows)
            return quantized(self.sizes, layer)[number](rows)

        return [
            oracle.attention_output(*self.inputs(rank, layer), layer, expert, quant=self.sizes.quant == 1)
            for layer in range(self.layers)
        ]

    def run(self, directory: Path, faults: twin.Faults | None = None) -> list[list[torch.Tensor]]:
        """The outputs of each A rank by layer. AssertionError when a process fails; each ends within its limit."""
        processes = self.start(directory, faults)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes), errors(directory)
        return [torch.load(directory / f"out-{rank}.pt") for rank in range(self.sizes.attention)]

    def start(self, directory: Path, faults: twin.Faults | None = None) -> list[BaseProcess]:
        targets = [(attention_rank, rank) for rank in range(self.sizes.attention)]
        targets += [(ffn_rank, rank) for rank in range(self.sizes.ffn)]
        processes = [CONTEXT.Process(target=main, args=(self, directory, faults, *target)) for target in targets]
        for process in processes:
            process.start()
        return processes


def errors(directory: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in directory.glob("*.error")}


def main(system: System, directory: Path, faults: twin.Faults | None, role, rank: int) -> None:
    watchdog = threading.Timer(system.limit_s, os._exit, [STUCK])
    watchdog.daemon = True
    watchdog.start()
    os.environ["BATCH_SIZE_FACTOR"] = str(system.rows / 262144)
    torch.set_num_threads(1)
    try:
        if system.npu:
            world_rank = rank + (system.sizes.attention if role is ffn_rank else 0)
            ops, group = on_npu(system, directory, world_rank)
            system = replace(system, sizes=system.sizes.but(group=group))
        else:
            ops = twin.load(directory, system.seed, faults)
        role(system, ops, rank, directory)
    except Exception as error:
        (directory / f"{role.__name__}-{rank}.error").write_text(str(error))
        raise


def on_npu(system: System, directory: Path, world_rank: int) -> tuple[OpModule, str]:
    """The real operators and the communicator's name, NPU ``world_rank`` bound. Never run on a device."""
    from torch.distributed import FileStore

    from ffn_faas.ascend.device import npu
    from ffn_faas.ascend.group import HcclGroup

    sizes = system.sizes
    npu(world_rank)
    ops = real_module()
    shape = CamShape(
        sizes.attention, sizes.ffn, sizes.all_experts, sizes.top_k, sizes.hidden, sizes.max_seq_len, sizes.tp,
        dynamic_quant=sizes.quant == 1,
    )  # fmt: skip
    group = HcclGroup(FileStore(str(directory / "store"), sizes.world), shape, world_rank, 1024)
    GROUPS.append(group)
    return ops, group.name


GROUPS: list[object] = []
"""Held until the process ends: a communicator is not destroyed under a receive."""


def attention_rank(system: System, ops: OpModule, rank: int, directory: Path) -> None:
    outputs = []
    for layer in range(system.layers):
        x, ids, weights = (tensor.to(device_of(system)) for tensor in system.inputs(rank, layer))
        calls.dispatch_send(ops, system.sizes, rank, layer, x, ids)
        outputs.append(calls.combine_recv(ops, system.sizes, rank, ids, weights).cpu())
    torch.save(outputs, directory / f"out-{rank}.pt")


def ffn_rank(system: System, ops: OpModule, rank: int, directory: Path) -> None:
    sizes = system.sizes
    experts = {"identity": Identity, "int4": Int4, "int8": Int8}[system.experts](system, ops, rank)
    open_layers = system.layers * sizes.attention // sizes.tp
    while open_layers:
        rows, row_scales, batch_info, counts = calls.dispatch_recv(ops, sizes, rank, device_of(system))
        result = experts(rows, row_scales, batch_info, counts)
        calls.combine_send(ops, sizes, rank, result, batch_info)
        open_layers -= int(batch_info[4]) == sizes.experts - 1


def device_of(system: System) -> str:
    return "npu" if system.npu else "cpu"


class Identity:
    def __init__(self, system: System, ops: OpModule, rank: int) -> None:
        self.sizes, self.device, self.first = system.sizes, device_of(system), rank * system.sizes.experts

    def __call__(self, rows, row_scales, batch_info, counts):
        total = int(counts.sum())
        if total == 0:
            return torch.zeros(1, self.sizes.hidden, dtype=self.sizes.dtype, device=self.device)
        layer = int(batch_info[2])
        factors = torch.tensor([(-1) ** e * 2.0 ** (e % 5 - layer % 3) for e in self.numbers()], device=self.device)
        values = rows[:total].float()
        if self.sizes.quant:
            values = values * row_scales[:total, None]
        return (values * factors.repeat_interleave(counts)[:, None]).to(self.sizes.dtype)

    def numbers(self) -> range:
        return range(self.first, self.first + self.sizes.experts)


class Int4:
    """All layers of one F rank, packed as the layered operators take them."""

    output_dtype = torch.bfloat16

    def __init__(self, system: System, ops: OpModule, rank: int) -> None:
        self.ops = ops
        own = slice(rank * system.sizes.experts, (rank + 1) * system.sizes.experts)
        layers = [int4_experts(system.sizes, layer)[own] for layer in range(system.layers)]
        self.w13 = [int4.to_words(stacked(experts, "w13")) for experts in layers]
        self.w2 = [int4.to_words(stacked(experts, "w2")) for experts in layers]
        self.scale13 = [scales.encode(stacked(experts, "scale13")) for experts in layers]
        self.scale2 = [scales.encode(stacked(experts, "scale2")).unsqueeze(1) for experts in layers]
        self.bias13 = [scales.compensation(stacked(e, "w13"), stacked(e, "scale13")) for e in layers]
        self.bias2 = [scales.compensation(stacked(e, "w2"), stacked(e, "scale2")) for e in layers]
        self.move(system)

    def move(self, system: System) -> None:
        """To the NPU, weights in the format that its matmuls take: a matter of storage alone."""
        if not system.npu:
            return
        import torch_npu

        for name in ("w13", "w2", "scale13", "scale2", "bias13", "bias2"):
            setattr(self, name, [tensor.npu() for tensor in getattr(self, name)])
        for name in ("w13", "w2"):
            setattr(self, name, [torch_npu.npu_format_cast(tensor, FRACTAL_NZ) for tensor in getattr(self, name)])

    def __call__(self, rows, row_scales, batch_info, counts):
        layer = batch_info[2:3].clone()
        middle, middle_scales = self.ops.gmm_swiglu_quant_v2_layered(
            rows, self.w13, self.scale13, self.bias13, row_scales, counts, layer, 0, 0, 1, None
        )
        (result,) = self.ops.grouped_matmul_layered(
            [middle], self.w2, self.bias2, self.scale2, layer, counts, middle_scales, 1, 3, self.output_dtype
        )
        return result


class Int8(Int4):
    def __init__(self, system: System, ops: OpModule, rank: int) -> None:
        self.ops = ops
        own = slice(rank * system.sizes.experts, (rank + 1) * system.sizes.experts)
        layers = [int8_experts(system.sizes, layer)[own] for layer in range(system.layers)]
        self.w13 = [stacked(experts, "w13") for experts in layers]
        self.w2 = [stacked(experts, "w2") for experts in layers]
        self.scale13 = [stacked(experts, "scale13") for experts in layers]
        self.scale2 = [stacked(experts, "scale2").bfloat16() for experts in layers]
        self.bias13 = []
        self.bias2 = [torch.zeros(w2.shape[0], w2.shape[2], dtype=torch.int32) for w2 in self.w2]
        self.move(system)


def stacked(experts: list, name: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([getattr(expert, name) for expert in experts]))


def int4_experts(sizes: Sizes, layer: int) -> list[oracle.Int4Expert]:
    return [oracle.Int4Expert(*random_weights(sizes, layer, e, 8, 0.02)) for e in range(sizes.all_experts)]


def int8_experts(sizes: Sizes, layer: int) -> list[oracle.Int8Expert]:
    experts = []
    for e in range(sizes.all_experts):
        w13, scale13, w2, scale2 = random_weights(sizes, layer, e, 128, 0.001)
        experts.append(oracle.Int8Expert(w13, scale13, w2, oracle.rounded(scale2, torch.bfloat16)))
    return experts


def random_weights(sizes: Sizes, layer: int, expert: int, half: int, size: float) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(10000 * layer + expert)
    w13 = random.integers(-half, half, (sizes.hidden, 2 * INTER), np.int8)
    w2 = random.integers(-half, half, (INTER, sizes.hidden), np.int8)
    scale13 = (size * random.uniform(0.5, 1.5, 2 * INTER)).astype(np.float32)
    scale2 = (size * random.uniform(0.5, 1.5, sizes.hidden)).astype(np.float32)
    return w13, scale13, w2, scale2
