"""A finished artifact, opened for reading: its facts, and one expert's tensors at a time.

Works from the manifest and the rank files alone; nothing here knows how they were made.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.facts import Facts
from hqconv.checkpoint.descriptors import Descriptors
from hqconv.checkpoint.safetensors import read_header
from hqconv.errors import InputError, VerificationError
from hqconv.schemas import artifact as names
from hqconv.schemas.dtypes import num_bits
from hqconv.schemas.tensors import TensorRef

Header = tuple[dict[str, TensorRef], dict[str, str]]
Tensors = dict[str, NDArray[Any]]


class Artifact(Facts):
    """An artifact in either layout; a context manager that closes the files it read."""

    def __init__(self, root: Path) -> None:
        """Read the manifest. Raises RequestError or VerificationError where there is none to rely on."""
        super().__init__(root)
        self._headers: dict[str, Header] = {}
        self._configs: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._descriptors = Descriptors(lambda path: os.open(root / path, os.O_RDONLY | os.O_CLOEXEC))

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were read."""
        self._descriptors.close()

    def header(self, path: str) -> Header:
        """Tensors and metadata of one file of the artifact, read once.

        Raises VerificationError for a damaged header.
        """
        with self._lock:
            if path not in self._headers:
                try:
                    entries, metadata, _ = read_header(self.root / path)
                except InputError as error:
                    raise VerificationError(
                        error.what, where=path, expected=error.expected, found=error.found
                    ) from error
                self._headers[path] = entries, metadata
            return self._headers[path]

    def layer_config(self, block: str, gemm: str, tp_rank: int, ep_rank: int) -> dict[str, Any]:
        """Humming's LayerConfig of one GEMM of one rank, as words. Raises VerificationError where there is none."""
        path = names.rank_file(block, tp_rank, ep_rank)
        metadata = self.header(path)[1]
        with self._lock:
            if (path, gemm) not in self._configs:
                self._configs[path, gemm] = _layer_config(path, gemm, metadata)
            return self._configs[path, gemm]

    def flags(self, block: str, gemm: str) -> dict[str, Any]:
        """The manifest's layout flags of one GEMM; none where it has no words on it."""
        words = self.blocks[block].get(gemm)
        flags = words.get("flags") if isinstance(words, dict) else None
        return flags if isinstance(flags, dict) else {}

    def read_expert(self, block: str, gemm: str, tp_rank: int, ep_rank: int, local: int) -> Tensors:
        """One expert's kernel tensors of one GEMM as raw bits, `[1, …]` each; keys without the block's prefix."""
        path = names.rank_file(block, tp_rank, ep_rank)
        prefix = f"{block}.{gemm}_"
        return {
            name.removeprefix(prefix): self._read_slice(path, ref, local)
            for name, ref in self.header(path)[0].items()
            if name.startswith(prefix) and not names.is_input_scale(name)
        }

    def read_input_scale(self, block: str, gemm: str, tp_rank: int, ep_rank: int) -> float | None:
        """The static scale of a GEMM's activations in one rank's file; None where the file has none.

        Raises VerificationError where it is no float32 [1].
        """
        path, name = names.rank_file(block, tp_rank, ep_rank), names.input_scale(block, gemm)
        ref = self.header(path)[0].get(name)
        if ref is None:
            return None
        if (ref.dtype, ref.shape) != ("F32", (1,)):
            found = f"{ref.dtype} {list(ref.shape)}"
            what, where = "An activation scale is not one number.", f"{path}, tensor {name}"
            raise VerificationError(what, where=where, expected="F32 [1]", found=found)
        return float(self._read_bits(path, ref).view(np.float32)[0])

    def _read_slice(self, path: str, ref: TensorRef, local: int) -> NDArray[Any]:
        if not ref.shape or local >= ref.shape[0]:
            where = f"{path}, tensor {ref.name}"
            raise VerificationError(
                "A rank file holds fewer experts.", where=where, expected=local + 1, found=ref.shape
            )
        entry = ref.entry(local)
        return self._read_bits(path, entry).reshape(1, *entry.shape)

    def _read_bits(self, path: str, ref: TensorRef) -> NDArray[Any]:
        """Raw bit patterns: unsigned integers as wide as the dtype."""
        data = np.empty(ref.num_bytes, np.uint8)
        self.read(path, data.data, ref.offset_bytes)
        return data.view(f"u{max(1, num_bits(ref.dtype) // 8)}")

    def read_module(self, prefix: str, shards: Mapping[str, str]) -> tuple[dict[str, str], Tensors]:
        """Dtypes and raw bits of the tensors whose name is `prefix` and one word; `shards` is name → file."""
        dtypes: dict[str, str] = {}
        tensors: Tensors = {}
        for word in ("weight", "weight_scale", "zero_point", "weight_scale_2", "bias"):
            if path := shards.get(prefix + word):
                ref = self.header(path)[0][prefix + word]
                tensors[word] = self._read_bits(path, ref).reshape(ref.shape)
                dtypes[word] = ref.dtype
        return dtypes, tensors

    def shards(self) -> dict[str, str]:
        """Tensor name → ordinary shard, of the checkpoint layout; damaged headers are the `files` check's business."""
        found: dict[str, str] = {}
        if self.manifest["layout"] != names.CHECKPOINT:
            return found
        for path in self.manifest["files"]:
            if self.is_shard(path):
                with suppress(VerificationError):
                    found |= dict.fromkeys(self.header(path)[0], path)
        return found

    def read(self, path: str, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset` of a file. Raises VerificationError where it ends too early."""
        with self._descriptors.using(path) as descriptor:
            while buffer:
                count = os.preadv(descriptor, [buffer], offset)
                if not count:
                    found = f"end at byte {offset}"
                    raise VerificationError("A file ends too early.", where=path, found=found)
                buffer, offset = buffer[count:], offset + count


def _layer_config(path: str, gemm: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        words = json.loads(metadata[gemm])
    except (KeyError, ValueError, RecursionError) as error:
        what = f"The file's metadata holds no LayerConfig for {gemm}."
        raise VerificationError(what, where=path, found=error) from error
    if not isinstance(words, dict):
        what, where = "A LayerConfig is not a JSON object.", f"{path}: {gemm}"
        raise VerificationError(what, where=where, found=words)
    return words
