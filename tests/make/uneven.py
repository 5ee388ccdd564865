"""A small Mixtral of random weights, some of whose layers count more than others: one token is one character."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hqconv.planning.calibration import BUILTIN_TEXT

_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "head_dim": 16,
}


def text_of(begin: int, end: int) -> str:
    """Return a part of the text that hqconv ships, by shares of a thousand."""
    text = BUILTIN_TEXT.read_text()
    return text[len(text) * begin // 1000 : len(text) * end // 1000]


def write_uneven(folder: Path, sizes: Sequence[float]) -> Path:
    """Save a model with a layer for each of `sizes`, by which its experts' outputs are multiplied, and a tokenizer."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = sorted(set(text_of(0, 500)))[:120]
    words = Tokenizer(
        models.WordLevel(
            {"none": 0} | {c: i for i, c in enumerate(characters, 1)}, unk_token="none"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="none")
    config = transformers.MixtralConfig(
        **_CONFIG, **_ATTENTION, vocab_size=len(characters) + 1, num_hidden_layers=len(sizes)
    )
    model: Any = transformers.MixtralForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(
                    torch.randn(weight.shape, generator=generator) / math.sqrt(weight.size(-1))
                )
            if name.endswith("down_proj"):
                weight.mul_(sizes[int(name.split(".")[2])])
        model.get_input_embeddings().weight.mul_(8)  # numbers near 1
        model.get_output_embeddings().weight.mul_(2)  # tokens of different probabilities
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
