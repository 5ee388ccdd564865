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
from hqconv.checkpoint.digest import sha256_of
from hqconv.checkpoint.hub import Listing
from hqconv.checkpoint.safetensors import parse_header, read_header
from hqconv.errors import InputError, VerificationError
from hqconv.schemas import artifact as names
from hqconv.schemas.dtypes import num_bits
from hqconv.schemas.tensors import TensorRef

Header = tuple[dict[str, TensorRef], dict[str, str]]
Tensors = dict[str, NDArray[Any]]


class Artifact(Facts):
    """An artifact in either layout; a context manager that closes the files it read.

    Of one on the Hub headers are read by range requests; a file whose tensors are read is downloaded first.
    """

    def __init__(self, root: Path, listing: Listing | None = None, *, is_sealed: bool = False) -> None:
        """Read the manifest as `read_manifest` does; listing: of a repo on the Hub, of which `root` has some files.

        Raises as `Facts`.
        """
        super().__init__(root, listing, is_sealed=is_sealed)
        self._headers: dict[str, Header] = {}
        self._configs: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._descriptors = Descriptors(lambda path: os.open(self.fetched(path), os.O_RDONLY | os.O_CLOEXEC))

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
                    entries, metadata, _ = self._read_header(path)
                except InputError as error:
                    raise VerificationError(
                        error.what, where=path, expected=error.expected, found=error.found
                    ) from error
                self._headers[path] = entries, metadata
            return self._headers[path]

    def _read_header(self, path: str) -> tuple[dict[str, TensorRef], dict[str, str], str]:
        if self.listing is None or path not in self.listing.sizes or (self.root / path).is_file():
            return read_header(self.root / path)
        return parse_header(path, self.listing.read_head(path), self.listing.sizes[path])

    # --- files

    def paths(self) -> list[str]:
        """All files of the folder or repo, and links to folders, which are not looked into; POSIX paths, sorted."""
        if self.listing is not None:
            return sorted(self.listing.sizes)
        found = []
        for folder, folders, files in os.walk(self.root):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            found += [(Path(folder) / name).relative_to(self.root).as_posix() for name in (*files, *links)]
        return sorted(found)

    def size_of(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""
        if (self.root / path).is_file():
            return (self.root / path).stat().st_size
        return None if self.listing is None else self.listing.sizes.get(path)

    def is_proven_by_hub(self, path: str) -> bool:
        """Whether a file is not here, but the Hub says its digest."""
        return self.listing is not None and path in self.listing.digests and not (self.root / path).is_file()

    def digest_of(self, path: str) -> str:
        """A file's sha256: of what is here, else as the Hub says, else of what is downloaded for it. Raises OSError."""
        if self.is_proven_by_hub(path):
            assert self.listing is not None
            return self.listing.digests[path]
        return sha256_of(self.fetched(path))

    def forget(self, path: str) -> None:
        """A file of a repo will be removed here; nobody may be reading it."""
        self._descriptors.drop(path)

    # --- tensors

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
