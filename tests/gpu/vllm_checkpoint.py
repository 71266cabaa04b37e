"""A checkpoint with the shape of Qwen3-30B-A3B, cut to a few layers, with random weights."""

import json

import torch

VOCABULARY = 32_000
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
"""Qwen3-30B-A3B but for vocabulary and number of layers."""


def make_checkpoint(directory, layers=4, vocabulary=VOCABULARY):
    from safetensors.torch import save_file

    config = CONFIG | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    generator = torch.Generator(device="cuda").manual_seed(5)

    def draw(*shape):
        values = torch.randn(shape, generator=generator, device="cuda").mul_(shape[-1] ** -0.5)
        return values.bfloat16().cpu()

    index, total = {}, 0

    def write(name, tensors):
        nonlocal total
        save_file(tensors, directory / name)
        index.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())

    hidden, inter = 2048, 768
    ends = {"model.embed_tokens.weight": draw(vocabulary, hidden), "lm_head.weight": draw(vocabulary, hidden)}
    ends["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    write("ends.safetensors", ends)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {
            f"{prefix}.{name}.weight": torch.ones(width, dtype=torch.bfloat16)
            for name, width in (
                ("input_layernorm", hidden),
                ("post_attention_layernorm", hidden),
                ("self_attn.q_norm", 128),
                ("self_attn.k_norm", 128),
            )
        }
        for name, rows, width in (
            ("self_attn.q_proj", 4096, hidden),
            ("self_attn.k_proj", 512, hidden),
            ("self_attn.v_proj", 512, hidden),
            ("self_attn.o_proj", hidden, 4096),
            ("mlp.gate", 128, hidden),
        ):
            tensors[f"{prefix}.{name}.weight"] = draw(rows, width)
        for expert in range(128):
            for name, rows, width in (
                ("gate_proj", inter, hidden),
                ("up_proj", inter, hidden),
                ("down_proj", hidden, inter),
            ):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = draw(rows, width)
        write(f"layer-{layer}.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
