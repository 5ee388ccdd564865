"""The parsed config.json of a model, and the language model's values in it."""

from __future__ import annotations

from collections.abc import Mapping

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
