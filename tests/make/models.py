"""Checkpoints that transformers itself wrote, and a big one of little content: the fixtures of the pipeline's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_COMMON = {"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}

# Sizes are small, unequal, and not powers of two where the formats allow it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        {**_ATTENTION, "intermediate_size": 192, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_ATTENTION,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 192,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def save_model(
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "150KB",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Let transformers make a tiny model with random weights and save it, with files of a tokenizer."""
    import transformers

    name, words = MODELS[family]
    config = getattr(transformers, f"{name}Config")(
        **{**_COMMON, "hidden_size": 128, **words, **overrides}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter) * 0.003)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "ключ": 1}\n', encoding="utf-8")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_bytes(bytes(range(256)))
    return folder


def save_big(
    folder: Path, layers: int, experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> Path:
    """A Qwen3-MoE checkpoint of one shard per layer, with experts and little else. Quick: blocks repeat."""
    folder.mkdir(parents=True)
    words = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(words))
    noise = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    weight_map = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {
            f"{prefix}.mlp.gate.weight": noise[: experts * hidden].reshape(experts, hidden).clone()
        }
        for expert in range(experts):
            for name, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            ):
                flat = noise.roll(len(tensors)).repeat(-(-inner * hidden // len(noise)))
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = flat[
                    : inner * hidden
                ].reshape(shape)
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
