"""vLLM's routed experts as a layer of their own (0.32): class RoutedExperts, below a runner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ffn_faas.attention.refusals import LayerFacts, engine_refusals, require_none

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.spec import MoESpec


def hooked() -> tuple[Any, ...]:
    """The classes to replace: vLLM's own, and those of models that derive from it. ImportError where it is not."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    return RoutedExperts, GptOssRoutedExperts


def remote_layer(base: Any) -> type:
    """The class that stands in for vLLM's RoutedExperts: with an afd block it holds no weights."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    from ffn_faas.attention import compat

    method = compat.remote_method()

    class RemoteRoutedExperts(base):
        """RoutedExperts whose experts live on F. Without an afd block every method is vLLM's own."""

        is_remote = False

        def _get_quant_method(self, prefix: str, quant_config: QuantizationConfig | None, moe_config: Any) -> Any:
            vllm_config = get_current_vllm_config()
            block = compat.afd_block(vllm_config)
            if block is None:
                return super()._get_quant_method(prefix, quant_config, moe_config)
            require_none(engine_refusals(compat.engine_facts(vllm_config, block)))
            self.is_remote = True
            return method(moe_config)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
            return () if self.is_remote else super().load_weights(weights)

        def get_expert_weights(self) -> Iterable[torch.Tensor]:
            return () if self.is_remote else super().get_expert_weights()

    return RemoteRoutedExperts


def layers_and_facts(
    model: torch.nn.Module, remote: tuple[type, ...], spec: MoESpec
) -> tuple[list[Any], list[LayerFacts]]:
    """The routed-experts layers of a built model in construction order, and what the refusals look at."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    facts = [layer_facts(runner, remote, spec) for runner in runners]
    return [runner.routed_experts for runner in runners], facts


def layer_facts(runner: Any, remote: tuple[type, ...], spec: MoESpec) -> LayerFacts:
    """Read one built layer; ``runner`` is vLLM's MoERunner, ``remote`` the classes of ours."""
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    layer, config = runner.routed_experts, runner.moe_config
    return LayerFacts(
        name=layer.layer_name,
        activation=config.activation.value,
        has_bias=config.has_bias and not spec.has_bias,
        activation_limits=layer.swiglu_limit not in (None, spec.swiglu_limit)
        or any(getattr(layer, name) is not None for name in ("swiglu_alpha", "swiglu_beta")),
        apply_router_weight_on_input=layer.apply_router_weight_on_input and config.experts_per_token > 1,
        skip_final_all_reduce=config.skip_final_all_reduce,
        num_fused_shared_experts=layer.expert_map_manager.num_fused_shared_experts,
        zero_experts=isinstance(runner.router, ZeroExpertRouter),
        class_name="" if isinstance(layer, remote) else type(layer).__name__,
    )
