"""Humming's tuning tables, remembered: working one out takes seconds of Python for each shape of GEMM, at every start.

A table says which tile sizes a GEMM has for which number of rows. It follows from the LayerConfig, from how the server
asks, and from the GPU model. `hqconv warm` leaves tables in its folder; what a server works out itself stays beside
Humming's cache of kernels.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from hqconv.serving.warm.gpus import Gpu, facts_here

_FOLDER = "hqconv-tuning"
# How vLLM asks for a table; a server that asks otherwise is not answered from memory.
_ASKED = ("gemm_type", "use_batch_invariant", "use_f16_accum")
_TEXTS: dict[Path, str] = {}


def tuning_key(config: Any, asked: Mapping[str, Any], gpu: Gpu) -> str:
    """A table's name: of Humming's LayerConfig, of the words of `_ASKED`, of the GPU model, of Humming's version."""
    version = importlib.import_module("humming").__version__
    words = [config.to_str(), dict(asked), gpu.name, gpu.sm_version, gpu.sm_count, version]
    return sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def is_table(words: Any) -> bool:
    """Return whether a document is a tuning table: ranges of row counts, each with its settings."""
    return (
        isinstance(words, list)
        and bool(words)
        and all(isinstance(entry, list) and len(entry) == 3 for entry in words)
        and all(type(least) is int and type(most) is int for least, most, _ in words)
        and all(isinstance(settings, dict) and "block_shape" in settings for *_, settings in words)
    )


@contextmanager
def remembered(tables: Mapping[str, Any]) -> Iterator[None]:
    """Inside it, vLLM's questions for tuning are answered from `tables`, from this user's cache, or by Humming.

    tables: of a folder of `hqconv warm`, by `tuning_key`. What Humming works out is kept; a cache that cannot be
    read or written is done without.
    """
    facade: Any = importlib.import_module("vllm.utils.humming")
    work_out = facade.get_heuristics_config

    def answer(layer_config: Any, **asked: Any) -> Any:
        if tuple(sorted(asked)) != _ASKED:
            return work_out(layer_config=layer_config, **asked)
        words = {**asked, "gemm_type": getattr(asked["gemm_type"], "value", asked["gemm_type"])}
        key = tuning_key(layer_config, words, facts_here())
        found = tables.get(key) or _read(key)
        if not is_table(found):
            found = work_out(layer_config=layer_config, **asked)
            _write(key, found)
        return found

    facade.get_heuristics_config = answer
    try:
        yield
    finally:
        facade.get_heuristics_config = work_out


def _place(key: str) -> Path:
    cache: Any = importlib.import_module("humming.utils.jit")
    return Path(cache.get_humming_cache_dir()) / _FOLDER / f"{key}.json"


def _read(key: str) -> Any:
    """This user's table, parsed anew: who asked may change it. Read once: layers ask the same while files are read."""
    with suppress(OSError, ValueError, RecursionError):
        path = _place(key)
        if path not in _TEXTS:
            _TEXTS[path] = path.read_text(encoding="utf-8")
        return json.loads(_TEXTS[path])
    return None


def _write(key: str, table: Any) -> None:
    path = _place(key)
    _TEXTS.pop(path, None)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(table, file)
            Path(name).replace(path)  # other ranks write the same
        except OSError:  # a full disk
            Path(name).unlink()
