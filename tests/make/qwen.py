"""Small checkpoints for tests, written with safetensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def set_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    """Change values of a checkpoint's config, or of another JSON file of it."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_qwen3_moe(
    folder: Path,
    *,
    num_layers: int = 2,
    num_experts: int = 4,
    hidden_size: int = 128,
    intermediate_size: int = 128,
    model_type: str = "qwen3_moe",
    seed: int = 0,
    with_attention: bool = False,
) -> Path:
    """A qwen3_moe checkpoint of one shard in `folder`, with a norm to copy per layer and a tokenizer file."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(64, hidden_size)}
    wide, tall = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = matrix(hidden_size)
        tensors[f"{prefix}.mlp.gate.weight"] = matrix(num_experts, hidden_size)
        for expert in range(num_experts):
            for projection, shape in (("gate_proj", tall), ("up_proj", tall), ("down_proj", wide)):
                tensors[f"{prefix}.mlp.experts.{expert}.{projection}.weight"] = matrix(*shape)
        for name in "qkvo" * with_attention:
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(hidden_size, hidden_size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": model_type,
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "moe_intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": num_layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative path."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
