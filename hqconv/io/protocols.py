"""What is known of a source before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.hub import Listing
from hqconv.io.sidecar_files import SidecarFiles
from hqconv.schemas.tensors import TensorRef


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file: name relative to the root, and what tells that it is still the same file.

    mtime_ns: 0 of a repo, whose commit says it.
    """

    name: str
    size_bytes: int
    header_sha256: str
    mtime_ns: int


class CheckpointHeaders(Protocol):
    """Names, headers and config of a source. What each attribute means: see `Checkpoint`."""

    root: Path
    name: str
    repo_id: str | None
    revision: str | None
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    files: tuple[SourceFile, ...]
    tensors: dict[str, TensorRef]
    metadata: tuple[Mapping[str, str], ...]
    index_sha256: str | None
    loose: SidecarFiles
    other_files: tuple[str, ...]
    total_bytes: int
    guard: FileSnapshot
    listing: Listing | None

    def is_here(self, name: str) -> bool:
        """Whether a file is on this machine; else it is read from the Hub, range by range."""
        ...

    def fetch(self, names: Iterable[str], check: Callable[[], None] | None = None) -> None:
        """Bring files of a repo to this machine; nothing where all are. See `Checkpoint`."""
        ...

    def forget(self, name: str) -> None:
        """A file of a repo will be removed from this machine."""
        ...
