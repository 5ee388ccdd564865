"""The parsed config.json of a model, and the language model's values in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Multimodal configs keep the language model's values under one of these, maybe under two; dbrx its experts'.
TEXT_CONFIG_KEYS = ("thinker_config", "text_config", "language_config", "llm_config", "ffn_config")

Config = Mapping[str, object]  # a parsed config.json


def text_config(config: Config) -> Config:
    """Return the language model's values: a nested text config, where there is one, over the outer config."""
    while True:
        key = next((key for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), Mapping)), None)
        if key is None:
            return config
        nested = config[key]
        assert isinstance(nested, Mapping)
        config = {**{k: v for k, v in config.items() if k != key}, **nested}


@dataclass(frozen=True)
class AttentionHeads:
    """Numbers of heads of a model's attention; None where the config has no such number.

    num_kv_heads: None for latent attention (MLA), too, whose keys and values every rank has whole.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None


NO_HEADS = AttentionHeads()
# Spellings of config.json; vLLM reads the same.
_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_MLA = ("kv_lora_rank", "compress_ratios")


def attention_heads(config: Config) -> AttentionHeads:
    """Return the heads of the language model in a config; values that are no positive number count as missing."""
    text = text_config(config)
    attention = text.get("attn_config")  # dbrx
    kv_heads = _first_count(text, _KV_HEADS)
    if kv_heads is None and isinstance(attention, Mapping):
        kv_heads = _first_count(attention, ("kv_n_heads",))
    is_latent = any(text.get(key) is not None for key in _MLA)
    return AttentionHeads(_first_count(text, _HEADS), None if is_latent else kv_heads)


def _first_count(config: Config, keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)
