"""Importance files: for a checkpoint of tests/make/qwen.py, or as a test says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.make.structured_inputs import as_tiles, structured_inputs


def columns_of(src: Path, seed: int = 0, ratio: float = 100.0) -> dict[str, torch.Tensor]:
    """Positive numbers for every layer of a qwen3_moe folder, a sixteenth of them `ratio` times as large."""
    config = json.loads((src / "config.json").read_bytes())
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for gemm, size in (("w13", config["hidden_size"]), ("w2", config["moe_intermediate_size"])):
            values = torch.rand(size, generator=generator) + 0.5
            values[torch.randperm(size, generator=generator)[: size // 16]] *= ratio
            found[f"model.layers.{layer}.mlp.experts.{gemm}"] = values
    return found


def with_products(columns: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """These columns and products of correlated inputs with the same mean squares."""
    found = dict(columns)
    for name, values in columns.items():
        x = structured_inputs(400, len(values), seed).float()
        x *= (values / x.square().mean(0)).sqrt()
        found[f"{name}.hessian"] = as_tiles(x.T @ x / len(x))
    return found


def write_importance(path: Path, columns: dict[str, torch.Tensor]) -> Path:
    """A file of these tensors."""
    save_file({name: values.clone() for name, values in columns.items()}, path)
    return path


def write_tokenizer(folder: Path) -> None:
    """A tokenizer in which one word is one token, by its number."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"none": 0} | {str(i): i for i in range(1, 64)}, unk_token="none"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="none").save_pretrained(folder)
