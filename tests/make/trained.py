"""A small Mixtral that was trained for some seconds on the text that hqconv ships: one token is one character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hqconv.planning.calibration import BUILTIN_TEXT

_CONFIG = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
_BATCH, _CONTEXT, _STEPS, _RATE = 16, 64, 250, 6e-3


def text_of(begin: int, end: int) -> str:
    """Return a part of the text, by shares of a thousand."""
    text = BUILTIN_TEXT.read_text()
    return text[len(text) * begin // 1000 : len(text) * end // 1000]


def write_trained(folder: Path, num_layers: int) -> Path:
    """Train on the first half of the text, and save with a tokenizer."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    text = text_of(0, 500)
    characters = sorted(set(text))[:120]
    words = Tokenizer(models.WordLevel({"none": 0} | {c: i for i, c in enumerate(characters, 1)}, unk_token="none"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="none")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **_CONFIG, **_ATTENTION, vocab_size=len(characters) + 1, num_hidden_layers=num_layers, head_dim=16
    )
    model: Any = transformers.MixtralForCausalLM(config)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, _STEPS)
    for _ in range(_STEPS):
        begins = torch.randint(len(ids) - _CONTEXT, (_BATCH,))
        batch = torch.stack([ids[begin : begin + _CONTEXT] for begin in begins])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
