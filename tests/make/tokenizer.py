"""A tokenizer for models of tests."""

from __future__ import annotations

from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    """A tokenizer in which one word is one token, by its number."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"none": 0} | {str(i): i for i in range(1, 64)}, unk_token="none")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="none").save_pretrained(
        folder
    )
