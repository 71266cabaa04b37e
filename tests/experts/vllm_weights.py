"""Run as ``python -m tests.experts.vllm_weights MODEL_DIR OUT [MODEL_DIR OUT ...]``: what vLLM's own loader loads.

Builds vLLM's model for each MODEL_DIR in this process, without an engine, lets vLLM's default loader load it, and saves
each RoutedExperts layer's weights and biases to OUT, before vLLM brings them into its kernel's layout.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

from tests.vllm_models import look_at_classes_in_process


def main(*pairs: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_port

    look_at_classes_in_process()
    for model, out in zip(pairs[::2], pairs[1::2], strict=True):
        config = EngineArgs(
            model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                initialize_model_parallel()
            save_file(_weights(config), out)


def _weights(config: object) -> dict[str, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(config.model_config.dtype):
        network = initialize_model(config)
    get_model_loader(config.load_config).load_weights(network, config.model_config)
    weights = {}
    for module in network.modules():
        if isinstance(module, RoutedExperts):
            for name, parameter in module.named_parameters():
                matrix = name.removesuffix("_weight")
                weights[f"{module.layer_name}.{matrix}"] = parameter.detach().contiguous()
    return weights


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
