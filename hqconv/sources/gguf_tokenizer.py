"""The tokenizer of a model in GGUF files, made from their metadata by transformers.

A GGUF file has the words of a tokenizer, and the names of the rules that cut texts. What the rules are is known for
the names of `_RULES` alone: transformers takes GPT-2's for every name that it does not know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqconv.io.gguf_header import Value
from hqconv.models.source_protocol import MadeFiles

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_NFC, _WHOLE_WORDS = "unicode form C", "whole words first"
# tokenizer.ggml.pre → what published tokenizers of the name do, and transformers' reading of GGUF files leaves out.
_RULES = {
    "gpt-2": (),
    "gpt-4o": (),
    "minimax-m2": (),
    "qwen2": (_NFC,),
    "llama-bpe": (_WHOLE_WORDS,),
    "tekken": (_WHOLE_WORDS,),
}
_CONTROL, _USER_DEFINED = 3, 4
_INSTALL = "run: pip install 'transformers>=5.23'"


def tokenizer_files(name: str, metadata: Mapping[str, Value]) -> MadeFiles:
    """Say which files the metadata of a file give, from its header; loads no transformers."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    names: tuple[str, ...] = (TOKENIZER, TOKENIZER_CONFIG)
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        names = (TEMPLATE, *names)
    if kind == "gpt2" and pre not in _RULES:
        return MadeFiles(name, obstacle=f"the rules of its tokenizer.ggml.pre, {pre or 'no value'}, are not known")
    if kind not in ("gpt2", "llama"):
        return MadeFiles(name, obstacle=f"its tokenizer.ggml.model, {kind or 'no value'}, is not known")
    if find_spec("transformers") is None:
        return MadeFiles(name, names, f"transformers is not installed ({_INSTALL})")
    return MadeFiles(name, names)


def make_tokenizer(made: MadeFiles, metadata_file: bytes) -> tuple[dict[str, bytes], str]:
    """Return the files, and a sentence about how they were made; no files, and the reason, where that is impossible.

    metadata_file: a GGUF file with the metadata alone.
    """
    if made.obstacle:
        return {}, made.failed(made.obstacle)
    try:
        with tempfile.TemporaryDirectory(prefix="hqconv-tokenizer-") as folder:
            path = Path(folder) / "metadata.gguf"
            path.write_bytes(metadata_file)
            saved = Path(folder) / "tokenizer"
            _convert(path).save_pretrained(saved)
            files = {name: (saved / name).read_bytes() for name in made.names}
    except ImportError as error:
        return {}, made.failed(f"transformers {_version('transformers')} cannot ({error}; {_INSTALL})")
    except Exception as error:  # noqa: BLE001 - of a library, about contents that it does not expect
        return {}, made.failed(f"transformers {_version('transformers')}: {type(error).__name__}: {error}"[:500])
    versions = f"transformers {_version('transformers')} and tokenizers {_version('tokenizers')}"
    return files, made.succeeded(versions)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of no known version"


def _convert(path: Path) -> Any:
    """Build transformers' tokenizer. Raises ValueError where its ids are not those of the file."""
    from tokenizers.normalizers import NFC
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, words, config = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, words)
    rules = _RULES[words["pre_tokenizer_type"]] if words["tokenizer_type"] == "gpt2" else ()
    if _NFC in rules:
        backend.normalizer = NFC()
    if _WHOLE_WORDS in rules:
        backend.model.ignore_merges = True
        config.setdefault("add_bos_token", True)  # as llama.cpp does for the same names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config, **more)
    _check_ids(tokenizer.get_vocab(), words)
    return tokenizer


def _check_ids(vocabulary: Mapping[str, int], words: Mapping[str, Any]) -> None:
    """Check that each id of the file is one word, and that special words have the file's ids."""
    tokens, types = words["tokens"], words.get("token_type") or [1] * len(words["tokens"])
    if sorted(vocabulary.values()) != list(range(len(tokens))):
        raise ValueError(f"{len(vocabulary)} words are made of the {len(tokens)} of the file")
    for number, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and vocabulary.get(text) != number:
            raise ValueError(f"the special word {text!r} gets the id {vocabulary.get(text)} instead of {number}")
