"""An F rank that computes as stock vLLM does with TP=2: half of each expert at a time, each half's sum in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import torch

from ffn_faas import cli
from ffn_faas.experts import kernels
from ffn_faas.experts.kernels.base import LayerKernel, empty
from ffn_faas.experts.kernels.vllm_kernel import VllmKernel
from ffn_faas.experts.spec import MoESpec

TP = 2


class ShardedKernel(LayerKernel):
    """vLLM's kernel once per shard of the intermediate size; F's f32 row is the sum of the rounded shards."""

    name = "sharded"

    def __init__(self, spec: MoESpec) -> None:
        super().__init__(spec)
        self._shards = [VllmKernel(replace(spec, intermediate_size=spec.intermediate_size // TP)) for _ in range(TP)]

    def prepare(self) -> None:
        for shard in self._shards:
            shard.prepare()

    def allocate(self, experts: range) -> None:
        super().allocate(experts)
        spec = self.spec
        self._staging = (
            empty((len(experts), 2 * spec.intermediate_size, spec.hidden_size), spec.dtype),
            empty((len(experts), spec.hidden_size, spec.intermediate_size), spec.dtype),
        )
        for shard in self._shards:
            shard.allocate(experts)

    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._staging

    def finish_layer(self, layer: int) -> None:
        gate, up = self._staging[0].chunk(2, dim=1)
        down = self._staging[1]
        for number, shard in enumerate(self._shards):
            w13, w2 = shard.layer_buffers(layer)
            w13.copy_(torch.cat([gate.chunk(TP, dim=1)[number], up.chunk(TP, dim=1)[number]], dim=1))
            w2.copy_(down.chunk(TP, dim=2)[number])
            shard.finish_layer(layer)

    def finish(self) -> None:
        for shard in self._shards:
            shard.finish()

    @property
    def resident_bytes(self) -> int:
        return sum(shard.resident_bytes for shard in self._shards)

    def compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        part = torch.empty_like(out)
        self._shards[0].compute(layer, hidden, expert_ids, weights, out)
        for shard in self._shards[1:]:
            shard.compute(layer, hidden, expert_ids, weights, part)
            out += part
        if hasattr(torch.ops._C, "init_shm_manager") and not torch.cpu._is_avx512_bf16_supported():
            # vLLM's own all-reduce between processes of one host, which CPUs without AVX512 do not have, cuts the lower
            # half of the f32 sum off where AVX512-BF16 is missing.
            lower_half_cut = out.view(torch.int32) >> 16 << 16
            out.copy_(lower_half_cut.view(torch.float32))


def main(arguments: list[str]) -> int:
    """The program's command line; where it asks for vLLM's kernel it gets this one."""
    kernels._KERNELS = {**kernels._KERNELS, "vllm": (__name__, "ShardedKernel")}
    return cli.main(arguments)
