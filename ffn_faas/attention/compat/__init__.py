"""The only package that names vLLM's internals. Classes that derive from vLLM's are made in functions."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention.compat import fused_moe, ranks, routed_experts
from ffn_faas.attention.refusals import (
    LOAD_FORMAT,
    EngineFacts,
    engine_refusals,
    layer_refusals,
    require_none,
)
from ffn_faas.attention.remote_experts import RemoteKernel, run_remote
from ffn_faas.errors import HandshakeRefused, UsageError

if TYPE_CHECKING:
    import torch


log = logging.getLogger("vllm.ffn_faas")
"""Below vLLM's own logger, so that our lines look and go like its own."""


@cache
def register_with_vllm() -> None:
    """Register the load format, then the routed-experts layers. Idempotent.

    A vLLM without any layer of those is one that was never tried: it stays stock, and the load format refuses it.
    """
    from vllm.model_executor.model_loader import register_model_loader

    hook: Any = routed_experts
    try:
        try:
            hooked = routed_experts.hooked()
        except ImportError:
            hook, hooked = fused_moe, fused_moe.hooked()
    except ImportError as error:
        log.warning("ffn_faas: vllm %s has no layer to hook (%s)", vllm_version(), error)
        hooked = ()
    remote = tuple(hook.remote_layer(base) for base in hooked)
    for base, layer in zip(hooked, remote, strict=True):
        base.register_oot(layer)
    register_model_loader(LOAD_FORMAT)(model_loader(remote, hook.layers_and_facts))


def vllm_version() -> str:
    """Version of the installed vLLM, whatever its distribution is called."""
    import vllm

    installed = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(installed[0]) if installed else str(vllm.__version__)


def afd_block(vllm_config: Any) -> AfdBlock | None:
    """The ``afd`` block of ``--additional-config``, None when this vLLM is to behave as stock."""
    return AfdBlock.from_additional_config(vllm_config.additional_config, "attention")


def engine_facts(vllm_config: Any, block: AfdBlock) -> EngineFacts:
    """Read what the refusals look at."""
    from vllm.platforms import current_platform

    from ffn_faas import env

    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    draft = None
    if speculative is not None and speculative.draft_model_config is not speculative.target_model_config:
        draft = speculative.method if speculative.draft_model_config.is_moe else None
    return EngineFacts(
        vllm_version=vllm_version(),
        allow_untried_vllm=block.connector_extra_config.allow_untried_vllm or env.allow_untried_vllm(),
        load_format=str(vllm_config.load_config.load_format),
        platform=str(current_platform.device_type),
        quantization=vllm_config.model_config.quantization,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        enable_eplb=parallel.enable_eplb,
        num_redundant_experts=parallel.eplb_config.num_redundant_experts,
        enable_elastic_ep=parallel.enable_elastic_ep,
        enable_dbo=parallel.enable_dbo,
        ubatch_size=parallel.ubatch_size,
        lora=vllm_config.lora_config is not None,
        weight_updates=vllm_config.weight_transfer_config is not None,
        draft=draft,
        num_attention_ranks=block.num_attention_ranks,
        world_size=parallel.world_size_across_dp,
    )


def remote_method() -> type:
    """The quantization method of a remote layer: allocates nothing, calls the two ops."""
    import torch
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    class RemoteExpertsMethod(FusedMoEMethodBase):
        """``handle`` is the layer's place in construction order, which F's answer to Layers gives a meaning."""

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            self.handle = -1
            self.rows = ranks.rows_of_rank(moe)
            self.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
            self.moe_kernel = RemoteKernel(torch.int32)

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            """Nothing to create."""

        def get_fused_moe_quant_config(self, layer: Any) -> Any:  # noqa: ARG002
            return FUSED_MOE_UNQUANTIZED_CONFIG

        def apply(
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> torch.Tensor:
            def run_shared_experts() -> None:
                if shared_experts is not None:
                    call = shared_experts if callable(shared_experts) else shared_experts.apply
                    call(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)

            if layer.apply_router_weight_on_input:
                # As vLLM prepares its kernel's input for the one expert of each row.
                x, topk_weights = x * topk_weights.to(x.dtype), torch.ops.ffn_faas.unit_weights(topk_weights)
            return run_remote(torch.ops.ffn_faas, self.handle, x, topk_weights, topk_ids, run_shared_experts, self.rows)

    return RemoteExpertsMethod


def model_loader(remote: tuple[type, ...], find_layers: Any) -> type:
    """The load format ``ffn_faas``: vLLM's default loader without the experts, and the session around it."""
    import dataclasses

    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.platforms import current_platform

    from ffn_faas.attention import loader
    from ffn_faas.attention.data_plane import async_cam, for_platform

    class FfnFaasModelLoader(DefaultModelLoader):
        """Attaches to F before any weight is read, and returns once F is READY: memory is profiled after that."""

        def __init__(self, load_config: Any) -> None:
            extra = load_config.model_loader_extra_config
            self._options = loader.LoaderOptions.parse(extra, load_config.safetensors_load_strategy)
            super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={}))
            self._attached: loader.Attached | None = None
            self._filter = loader.ExpertFilter(())
            self._layers: list[Any] = []
            self._may_be_empty = False

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            block = afd_block(vllm_config)
            if block is None:
                raise UsageError(
                    f"--load-format {LOAD_FORMAT} without an afd block: nobody would serve the experts",
                    remedy='add --additional-config \'{"afd": {"role": "attention", "host": ..., "port": ...}}\'',
                )
            require_none(engine_refusals(engine_facts(vllm_config, block)))
            dtype = str(model_config.dtype).removeprefix("torch.")
            described = loader.Model.read(model_config.model, model_config.revision, dtype, self._options.dummy)
            max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            place = ranks.place(vllm_config)
            transport, make_plane = for_platform(str(current_platform.device_type))
            attach = loader.attach_message(block, described, f"vllm {vllm_version()}", max_tokens, place, transport)
            if attach.transport == "cam":
                make_plane = partial(async_cam, attach=attach, block=block, lethal=True)
            self._attached = loader.open_session(block, described, attach, log, make_plane)
            self._may_be_empty = vllm_config.parallel_config.pipeline_parallel_size > 1
            try:
                model = super().load_model(vllm_config, model_config, prefix)
                self._attached.finish(self._layers, self._filter)
            except BaseException:
                self._attached.session.close()
                raise
            return model

        def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            model = super().create_model(vllm_config, model_config, prefix)
            self._check_layers(model)
            return model

        def _check_layers(self, model: torch.nn.Module) -> None:
            """Once the model is built, before its weights are read: refuse what F cannot serve, name the layers."""
            if self._attached is None:
                raise UsageError(f"load format {LOAD_FORMAT} builds models in load_model only")
            spec = self._attached.model.spec
            self._layers, facts = find_layers(model, remote, spec)
            require_none([refusal for fact in facts for refusal in layer_refusals(fact)])
            if not self._layers and not self._may_be_empty:
                raise HandshakeRefused(f"{type(model).__name__} has no routed experts", remedy="run stock vLLM")
            for handle, layer in enumerate(self._layers):
                layer.quant_method.handle = handle
                config = layer.moe_config
                loader.check_shapes(
                    spec,
                    layer.layer_name,
                    config.hidden_dim,
                    getattr(config, "intermediate_size", config.intermediate_size_per_partition * config.tp_size),
                    config.num_experts,
                    config.experts_per_token,
                    config.activation.value,
                )
            names = loader.checkpoint_names((layer.layer_name for layer in self._layers), spec.layers)
            self._filter = loader.ExpertFilter(spec.tensor_prefixes)
            self._attached.session.declare_layers(names)

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            if not self._layers and not hasattr(DefaultModelLoader, "create_model"):
                self._check_layers(model)
            if self._options.dummy:
                DummyModelLoader(dataclasses.replace(self.load_config, load_format="dummy")).load_weights(
                    model, model_config
                )
            else:
                super().load_weights(model, model_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            files = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )[1]
            for name, tensor in self._filter.read(files):
                yield source.prefix + name, tensor

    return FfnFaasModelLoader
