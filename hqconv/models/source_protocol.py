"""Interface of a source for planning, conversion and verification, independent of how its experts are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from hqconv.io.checkpoint_files import SidecarFiles
from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.gguf_header import StoredModel
from hqconv.io.hub import Listing
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.source_matrix import SourceMatrix


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file: its name relative to the root, and facts that show a change.

    mtime_ns: 0 for a file of a Hub repo, which its commit identifies.
    """

    name: str
    size_bytes: int
    header_sha256: str
    mtime_ns: int


def read_tensor(source: Source, ref: TensorRef) -> torch.Tensor:
    """Read a tensor to the CPU, in its stored dtype. Raises InputError as `Source.read_into`."""
    import torch

    host = torch.empty(ref.shape, dtype=torch_dtype(ref.dtype))
    source.read_into(ref, host.flatten().view(torch.uint8).numpy().data)
    return host


MADE, NOT_MADE = (
    "The tokenizer was made",
    "No tokenizer was made",
)  # the warnings of a manifest begin so


@dataclass(frozen=True, slots=True)
class MadeFiles:
    """The tokenizer's files that an artifact gets from the metadata of a source's file `origin`.

    obstacle: why they cannot be made here; "" if they can. A conversion may still find that they cannot.
    """

    origin: str = ""
    names: tuple[str, ...] = ()
    obstacle: str = ""

    @property
    def planned(self) -> tuple[str, ...]:
        """The files that a conversion here would make."""
        return () if self.obstacle else self.names

    @property
    def notice(self) -> str:
        """Return what a dry run says of files that will be made."""
        return (
            f"the tokenizer will be made from the metadata of {self.origin} by transformers. The publisher's files "
            "beside it are taken instead, if the source is a folder that has them."
        )

    def succeeded(self, versions: str) -> str:
        """Return the warning of a manifest about files that were made."""
        return (
            f"{MADE} from the metadata of {self.origin} by {versions}; it may differ from the "
            f"publisher's: {', '.join(self.names)}."
        )

    def failed(self, reason: str) -> str:
        """Return the warning of a manifest without the files."""
        return f"{NOT_MADE} from the metadata of {self.origin}: {reason}."


class Source(Protocol):
    """A checkpoint, GGUF files, or an artifact. A context manager that closes its files.

    Opening one reads headers only and loads no torch; `read_expert` and `read_raw` do.

    root: the folder. place: the folder, or the file of a source that is one GGUF model of a folder, and takes nothing
    else of it. name: the folder's or the file's, or the repo's without the organisation. repo_id, revision: Hub id and
    commit, None for a folder. config: config.json. quantization: its quantization_config or the file that stands for
    it. files: the weight files sorted by name. tensors: by file, then by offset. metadata: `__metadata__` of each file.
    index_sha256: None without an index. loose: the files beside the weights. other_files: the names of loose files that
    an artifact gets verbatim, relative to root. made: the files that it gets made from metadata. total_bytes: of all
    tensors. guard: state of all files that are read. listing: files of a Hub repo of which some are not on this
    machine, else None.
    sorted_layers: the layers of an artifact whose intermediate columns were sorted by group (`intermediate_order` in
    its manifest). stored_model: the GGUF files as they are, where `read_into` gives other tensors than they hold.
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
    metadata: tuple[Mapping[str, str], ...]
    index_sha256: str | None
    loose: SidecarFiles
    other_files: tuple[str, ...]
    made: MadeFiles
    total_bytes: int
    guard: FileSnapshot
    listing: Listing | None
    sorted_layers: frozenset[str]
    stored_model: StoredModel | None

    @property
    def reads_ahead(self) -> bool:
        """Return True if the bytes of experts are ranges that `read_raw` can fetch before they are decoded."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Close the files; no read may be under way, and none may follow."""
        ...

    def map_experts(self) -> ExpertMap:
        """Map the experts, and every tensor to its use. Raises RequestError or InputError for unclear tensors."""
        ...

    def make_files(self) -> tuple[dict[str, bytes], str]:
        """Return `made` files and a sentence for the manifest about how, or about why there are none.

        ({}, "") for a source whose files are never made. May load transformers. Raises InputError for a file that
        changed, NetworkError.
        """
        ...

    def is_here(self, name: str) -> bool:
        """Return True if a file is on this machine; else it is read from the Hub, range by range."""
        ...

    def fetch(
        self,
        names: Iterable[str],
        check: Callable[[], None] | None = None,
        into: Path | None = None,
    ) -> None:
        """Download files of a repo that are not in the Hub cache; any thread may. Nothing happens for a folder.

        check: called between pieces of a download, see `hub.fetch_file`. into: the folder for the files; None for the
        Hub cache.
        """
        ...

    def forget(self, name: str) -> None:
        """Read a file of a repo from the Hub again, as its copy will be removed; any thread may call it."""
        ...

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` with a tensor's bytes from byte `start` on; any thread may. Raises InputError."""
        ...

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor; adjoining ranges are read by one call. Raises InputError."""
        ...

    def read_raw(self, raw: RawExperts, places: Iterable[tuple[TensorRef, int]]) -> None:
        """Read byte ranges into the buffer, each to its start; any thread may. Raises InputError.

        Only if `reads_ahead`.
        """
        ...

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert on `device`; any thread may. Raises InputError for unusable values.

        With `raw` nothing is read from files; the result may hold views of it.
        """
        ...
