"""Cache of Humming's tuning tables: computing one takes seconds of Python for each shape of GEMM, at every start.

A table maps numbers of rows to tile sizes of a GEMM. It follows from the LayerConfig, the arguments of the server's
request, and the GPU model. `hqconv warm` writes tables to its folder; tables that a server computes are stored next to
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

from hqconv.kernel_layout.kernel_sources import current_device

_FOLDER = "hqconv-tuning"
# Arguments of vLLM's request for a table; requests with others are not answered from the cache.
_ASKED = ("gemm_type", "use_batch_invariant", "use_f16_accum")
_TEXTS: dict[Path, str] = {}


def tuning_key(config: Any, asked: Mapping[str, Any], gpu: Any) -> str:
    """Name of a table: hash of Humming's LayerConfig, the arguments in `_ASKED`, the GPU model, Humming's version.

    gpu: Humming's device, or anything that has its name, SM version and number of SMs.
    """
    version = importlib.import_module("humming").__version__
    document = [config.to_str(), dict(asked), gpu.name, gpu.sm_version, gpu.sm_count, version]
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def is_table(document: Any) -> bool:
    """Return whether a document is a tuning table: ranges of row counts, each with its settings."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(entry, list) and len(entry) == 3 for entry in document)
        and all(type(least) is int and type(most) is int for least, most, _ in document)
        and all(
            isinstance(settings, dict) and "block_shape" in settings for *_, settings in document
        )
    )


@contextmanager
def remembered(tables: Mapping[str, Any]) -> Iterator[None]:
    """Context in which vLLM's requests for tuning are answered from `tables`, from this user's cache, or by Humming.

    tables: of a folder of `hqconv warm`, by `tuning_key`. Tables that Humming computes are kept; a cache that cannot
    be read or written is not used.
    """
    facade: Any = importlib.import_module("vllm.utils.humming")
    work_out = facade.get_heuristics_config

    def answer(layer_config: Any, **asked: Any) -> Any:
        if tuple(sorted(asked)) != _ASKED:
            return work_out(layer_config=layer_config, **asked)
        document = {**asked, "gemm_type": getattr(asked["gemm_type"], "value", asked["gemm_type"])}
        key = tuning_key(layer_config, document, current_device())
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
    """Table of this user's cache, parsed anew as callers may change it; the file is read once for all layers."""
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
