"""Interface of a source for planning, conversion and verification, independent of how its experts are stored.

Three parts: the headers, from which a conversion is planned, the bytes, and the files that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from hqconv.io.checkpoint_files import SidecarFiles
from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.hub import Listing
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer, RawExperts
from hqconv.schemas.tensors import TensorRef, torch_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.encoding import SourceMatrix


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file: its name relative to the root, and facts that show a change.

    mtime_ns: 0 for a file of a Hub repo, which its commit identifies.
    """

    name: str
    size_bytes: int
    header_sha256: str
    mtime_ns: int


class ReferenceTensor(NamedTuple):
    """A tensor as a reference knows it. pieces: its bytes in order, uint8; reading them raises InputError."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterator[np.ndarray[Any, Any]]


class SourceReference(Protocol):
    """Independent account of a source whose files hold other tensors than `read_into` gives: for verification alone."""

    def tensor(self, name: str) -> ReferenceTensor | None:
        """Return a tensor beside the experts; None where nothing in the files has its values."""
        ...

    def lost(
        self, copied: Collection[str], converted: Collection[str], dropped: Collection[str]
    ) -> Iterable[str]:
        """Return the tensors of the files that an artifact with these accounts has lost."""
        ...

    def is_projection(self, role: str, tensor: str, index: int) -> bool:
        """Return whether a role's matrices are entry `index` of the projections in a tensor of the files."""
        ...


class SourceHeaders(Protocol):
    """Facts of a source that are known without its weights.

    root: the folder. place: the folder, or the file of a source that takes nothing else of its folder. name: the
    folder's or the file's, or the repo's without the organisation. repo_id, revision: Hub id and commit, None for a
    folder. config: config.json. quantization: its quantization_config or the file that stands for it. files: the weight
    files sorted by name. tensors: by file, then by offset. index_sha256: None without an index. sidecar_files: the
    files beside the weights. sorted_layers: the layers of an artifact whose intermediate columns were sorted by group
    (`intermediate_order` in its manifest).
    """

    root: Path
    place: Path
    name: str
    repo_id: str | None
    revision: str | None
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    files: tuple[SourceFile, ...]
    tensors: dict[str, TensorRef]
    index_sha256: str | None
    sidecar_files: SidecarFiles
    sorted_layers: frozenset[str]

    def map_experts(self) -> ExpertMap:
        """Map the experts, and every tensor to its use. Raises RequestError or InputError for unclear tensors."""
        ...


class SourceBytes(Protocol):
    """The weights of a source. Any thread may read. Only `read_expert` loads torch.

    reads_ahead: whether the bytes of experts are ranges that are read before they are decoded (`RawExperts`).
    """

    @property
    def reads_ahead(self) -> bool: ...

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` with a tensor's bytes from byte `start` on. Raises InputError."""
        ...

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor; adjoining ranges are read by one call. Raises InputError."""
        ...

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert on `device`. Raises InputError for unusable values.

        With `raw` nothing is read from files; the result may hold views of it.
        """
        ...

    def reference(self) -> SourceReference | None:
        """Return the reference for `read_into`; None where it gives what the files hold."""
        ...


class SourceFiles(Protocol):
    """The files of a source. Any thread may call the methods.

    guard: state of all files that are read. listing: files of a Hub repo of which some are not on this machine, else
    None.
    """

    guard: FileSnapshot
    listing: Listing | None

    def is_here(self, name: str) -> bool:
        """Return True if a file is on this machine; else it is read from the Hub, range by range."""
        ...

    def fetch(
        self,
        names: Iterable[str],
        check: Callable[[], None] | None = None,
        into: Path | None = None,
    ) -> None:
        """Download files of a repo that are not in the Hub cache. Nothing happens for a folder.

        check: called between pieces of a download, see `hub.fetch_file`. into: the folder for the files; None for the
        Hub cache.
        """
        ...

    def forget(self, name: str) -> None:
        """Read a file of a repo from the Hub again, as its copy will be removed."""
        ...


class Source(SourceHeaders, SourceBytes, SourceFiles, Protocol):
    """A checkpoint, GGUF files, or an artifact. A context manager that closes its files.

    Opening one reads headers only and loads no torch.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Close the files; no read may be under way, and none may follow."""
        ...


def read_tensor(source: Source, ref: TensorRef) -> torch.Tensor:
    """Read a tensor to the CPU, in its stored dtype. Raises InputError as `Source.read_into`."""
    import torch

    host = torch.empty(ref.shape, dtype=torch_dtype(ref.dtype))
    source.read_into(ref, host.flatten().view(torch.uint8).numpy().data)
    return host
