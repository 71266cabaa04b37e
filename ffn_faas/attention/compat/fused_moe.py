"""vLLM's routed experts before they were a layer of their own (0.23): class FusedMoE, which holds its runner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ffn_faas.attention.refusals import LayerFacts, engine_refusals, require_none

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec


class RemoteQuantization:
    """Stands where FusedMoE looks for a quantization config while it chooses its method."""

    def __init__(self, method: type) -> None:
        self._method = method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:  # noqa: ARG002
        return self._method(layer.moe_config)

    def get_name(self) -> str:
        return "ffn_faas"


def hooked() -> tuple[Any, ...]:
    """The classes to replace. Raises ImportError where vLLM has them no more."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE

    if not isinstance(FusedMoE, type) or not hasattr(FusedMoE, "register_oot"):
        raise ImportError("FusedMoE is no layer that can be replaced")
    return (FusedMoE,)


def remote_layer(base: Any) -> type:
    """The class that stands in for FusedMoE: with an afd block it holds no weights."""
    from vllm.config import get_current_vllm_config

    from ffn_faas.attention import compat

    method = compat.remote_method()

    class RemoteFusedMoE(base):
        """FusedMoE whose experts live on F. Without an afd block every method is vLLM's own."""

        is_remote = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            vllm_config = get_current_vllm_config()
            block = compat.afd_block(vllm_config)
            if block is None:
                super().__init__(*args, **kwargs)
                return
            require_none(engine_refusals(compat.engine_facts(vllm_config, block)))
            super().__init__(*args, **kwargs | {"quant_config": RemoteQuantization(method)})
            self.quant_config = None
            self.is_remote = True

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
            return () if self.is_remote else super().load_weights(weights)

        def get_expert_weights(self) -> Iterable[torch.Tensor]:
            return () if self.is_remote else super().get_expert_weights()

    return RemoteFusedMoE


def layers_and_facts(
    model: torch.nn.Module, remote: tuple[type, ...], spec: MoESpec
) -> tuple[list[Any], list[LayerFacts]]:
    """The routed-experts layers of a built model in construction order, and what the refusals look at."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE

    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return layers, [layer_facts(layer, remote, spec) for layer in layers]


def layer_facts(layer: Any, remote: tuple[type, ...], spec: MoESpec) -> LayerFacts:
    """Read one built layer; ``remote`` are the classes of ours."""
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    config = layer.moe_config
    return LayerFacts(
        name=layer.layer_name,
        activation=layer.activation.value,
        has_bias=config.has_bias and not spec.has_bias,
        activation_limits=layer.swiglu_limit not in (None, spec.swiglu_limit),
        apply_router_weight_on_input=layer.apply_router_weight_on_input and config.experts_per_token > 1,
        num_fused_shared_experts=layer.num_fused_shared_experts,
        zero_experts=isinstance(layer.router, ZeroExpertRouter),
        class_name="" if isinstance(layer, remote) else type(layer).__name__,
    )
