"""One MoE layer of a CPU bench: its shape, and a kernel that holds random weights of it."""

from __future__ import annotations

from dataclasses import dataclass

from ffn_faas.experts.kernels import create_kernel
from ffn_faas.experts.kernels.base import ExpertKernel
from ffn_faas.experts.loader import load_experts
from ffn_faas.experts.spec import MoESpec


@dataclass(frozen=True)
class LayerShape:
    """Defaults: Qwen3-30B-A3B. ``layers`` of the same shape are resident and used in turn."""

    hidden: int = 2048
    inter: int = 768
    experts: int = 128
    top_k: int = 8
    layers: int = 1
    dtype: str = "bfloat16"

    def spec(self) -> MoESpec:
        """The description that kernels take. Raises ModelRefused for sizes that make no sense."""
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inter,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "hidden_act": "silu",
            "torch_dtype": self.dtype,
        }
        return MoESpec.from_config(config, self.dtype, name="the benched layer")

    def flops(self, tokens: int) -> int:
        """Multiplications and additions of a batch in which every token has ``top_k`` experts."""
        return 6 * tokens * self.top_k * self.hidden * self.inter


def make_kernel(name: str, shape: LayerShape) -> ExpertKernel:
    """A kernel of ``--moe-kernel`` with random weights, the same for every kernel. Blocks for some seconds."""
    return fill(create_kernel(name, shape.spec()))


def fill(kernel: ExpertKernel) -> ExpertKernel:
    """``kernel`` itself, loaded with the random weights."""
    load_experts(kernel.spec, None, range(kernel.spec.num_experts), kernel, lambda done, total: None)
    return kernel
