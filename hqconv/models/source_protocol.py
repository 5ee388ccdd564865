"""Interface of a source for planning, conversion and verification, independent of how its experts are stored.

Three parts: the headers, from which a conversion is planned, the bytes, and the files that hold them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from hqconv.formats.quant_config import declared_formats
from hqconv.io.checkpoint_files import SidecarFiles
from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.hub import Listing
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer, RawExperts, TensorRefs, stored_shape
from hqconv.models.tensor_names import decoder_layer, is_router, lost_modules, without_wrappers
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.tensors import DTYPES, FLOATS, TensorRef, TensorSpec, num_bits, torch_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.encoding import SourceMatrix
    from hqconv.formats.quant_config import DeclaredFormats


# names of static scales of activations, for which weights need no decoding
INPUT_SCALE = re.compile(r"(?:^|[._])(?:input|activation|output)_(?:global_)?scale(?:_2)?$")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file: its name relative to the root, and facts that show a change."""

    name: str
    size_bytes: int
    header_sha256: str


class ReferenceTensor(NamedTuple):
    """A tensor as a reference knows it. pieces: its bytes in order, uint8; reading them raises InputError."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterator[np.ndarray[Any, Any]]


class SourceReference(Protocol):
    """Independent account of a source whose files hold other tensors than `read_into` gives: for verification alone."""

    def tensor(self, name: str) -> ReferenceTensor | None:
        """Return a tensor beside the experts; None where nothing in the files has its values."""

    def lost(
        self, copied: Collection[str], converted: Collection[str], dropped: Collection[str]
    ) -> Iterable[str]:
        """Return the tensors of the files that an artifact with these accounts has lost."""

    def is_projection(self, role: str, tensor: str, index: int) -> bool:
        """Return whether a role's matrices are entry `index` of the projections in a tensor of the files."""


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


class SourceBytes(Protocol):
    """The weights of a source. Any thread may read. Only `read_expert` loads torch.

    reads_ahead: whether the bytes of experts are ranges that are read before they are decoded (`RawExperts`).
    """

    @property
    def reads_ahead(self) -> bool: ...

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` with a tensor's bytes from byte `start` on. Raises InputError."""

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor; adjoining ranges are read by one call. Raises InputError."""

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

    def reference(self) -> SourceReference | None:
        """Return the reference for `read_into`; None where it gives what the files hold."""


class SourceFiles(Protocol):
    """The files of a source. Any thread may call the methods.

    guard: state of all files that are read. listing: files of a Hub repo of which some are not on this machine, else
    None.
    """

    guard: FileSnapshot
    listing: Listing | None

    def is_here(self, name: str) -> bool:
        """Return True if a file is on this machine; else it is read from the Hub, range by range."""

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

    def forget(self, name: str) -> None:
        """Read a file of a repo from the Hub again, as its copy will be removed."""


class Source(SourceHeaders, SourceBytes, SourceFiles, Protocol):
    """A checkpoint, GGUF files, or an artifact. A context manager that closes its files.

    Opening one reads headers only and loads no torch.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Close the files; no read may be under way, and none may follow."""


def read_rows(source: Source, ref: TensorRef, num_values: int) -> Iterator[torch.Tensor]:
    """Read a tensor in runs of whole rows of about `num_values`, float32 [rows, columns]; a vector is one row."""
    import torch

    num_columns = math.prod(ref.shape[1:] if len(ref.shape) > 1 else ref.shape)
    row_bytes = num_columns * num_bits(ref.dtype) // 8
    step = max(num_values // num_columns, 1) * row_bytes
    for start in range(0, ref.num_bytes, step):
        data = torch.empty(min(step, ref.num_bytes - start), dtype=torch.uint8)
        source.read_into(ref, data.numpy().data, start)
        yield data.view(torch_dtype(ref.dtype)).view(-1, num_columns).float()


def read_module(
    source: Source, declared: DeclaredFormats, parts: TensorRefs, shape: tuple[int, int]
) -> SourceMatrix:
    """Decode the weight of a module beside the experts. Raises InputError or RequestError for one that is not known."""
    from hqconv.formats.encoding import decode_matrix, resolve_format

    module = next(iter(parts.values())).name.rpartition(".")[0]
    headers = {part: TensorSpec(*ref[:3]) for part, ref in parts.items()}
    fmt = resolve_format(declared.of(module), headers, *shape)
    tensors = {part: read_tensor(source, parts[name]) for part, name in fmt.used.items()}
    names = {part: parts[name].name for part, name in fmt.used.items()}
    return decode_matrix(fmt.format, tensors, shape, names)


def read_tensor(source: SourceBytes, ref: TensorRef, *, pin_memory: bool = False) -> torch.Tensor:
    """Read a tensor to the CPU, in its stored dtype. Raises InputError as `Source.read_into`."""
    import torch

    host = torch.empty(stored_shape(ref), dtype=torch_dtype(ref.dtype), pin_memory=pin_memory)
    source.read_into(ref, host.flatten().view(torch.uint8).numpy().data)
    return host


class DenseTensors:
    """The copied tensors of a checkpoint, by module without the names of wrappers, and by part.

    layers: those of which tensors are read, None for all. max_weights: of a matrix that is decoded whole; 0 for a
    sample, of whose matrices only routers are read.
    """

    def __init__(
        self,
        source: Source,
        experts: ExpertMap,
        layers: Iterable[MoeLayer] | None,
        max_weights: int,
    ) -> None:
        self.source = source
        self.max_weights = max_weights
        self.places = None if layers is None else {decoder_layer(layer.name) for layer in layers}
        self.is_decoded = source.reference() is not None  # from GGUF
        self.modules: dict[str, dict[str, TensorRef]] = {}
        for name in experts.copied:
            module, _, part = name.rpartition(".")
            self.modules.setdefault(without_wrappers(module), {})[part] = source.tensors[name]
        # of a repo each would be a request
        dropped = experts.dropped if source.listing is None else ()
        self.input_scales = [source.tensors[name] for name in dropped if INPUT_SCALE.search(name)]
        self.declared = declared_formats(source.quantization, text_config(source.config))

    def is_read(self, ref: TensorRef) -> bool:
        """Return whether a tensor has values that are looked at."""
        place = decoder_layer(ref.name)
        is_chosen = self.places is None or not place or place in self.places
        is_small = len(ref.shape) < 2 or is_router(ref.name) or self.max_weights > 0
        return ref.num_bytes > 0 and is_chosen and is_small and bool(DTYPES[ref.dtype].torch)

    def common(self, original: DenseTensors) -> list[str]:
        """Return the modules that an original has as well and that are read, norms first."""
        return sorted(
            (
                module
                for module, parts in self.modules.items()
                if module in original.modules and any(map(self.is_read, parts.values()))
            ),
            key=lambda module: "norm" not in module,
        )

    def is_coded_otherwise(self, original: DenseTensors, module: str) -> bool:
        """Return whether a module is quantized in one of both, or in both in another way."""
        both = [tensors.modules[module] for tensors in (self, original)]
        forms = [{(part, *ref[1:3]) for part, ref in parts.items()} for parts in both]
        dtypes = {ref.dtype for parts in both for ref in parts.values()}
        return forms[0] != forms[1] and not dtypes <= {*FLOATS, "F64", "I64"}

    def lost(self, original: DenseTensors) -> Iterator[tuple[str, bool]]:
        """Yield a tensor of each module of the original that is lost, and whether it may be here otherwise."""
        text = text_config(self.source.config)
        is_tied = self.source.config.get(
            "tie_word_embeddings", text.get("tie_word_embeddings", True)
        )
        for module, is_renamed in lost_modules(self.modules, original.modules):
            parts = original.modules[module]
            if not (module == "lm_head" and is_tied) and "inv_freq" not in parts:
                yield next(iter(parts.values())).name, is_renamed
