"""Reader of artifacts: manifest facts as typed values, impossible ones refused; headers, rank files and raw tensors."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hqconv.artifact.manifest import ManifestLayer, read_manifest
from hqconv.artifact.rank_file import Finding, RankFile, parse_rank_file
from hqconv.errors import HqconvError, InputError, RequestError, VerificationError
from hqconv.formats.source_format import SourceFormat
from hqconv.io.file_access import Descriptors, sha256_of
from hqconv.io.hub import Listing
from hqconv.io.safetensors_header import parse_header, read_header
from hqconv.models.families import BY_NAME, Family
from hqconv.models.linear_layers import LinearGroup, is_linear_group, linear_group
from hqconv.models.moe_layer import MoeLayer, TensorSlice
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.planning.output_units import gemm_shapes
from hqconv.planning.spec import ConversionSpec, DenseSchemas
from hqconv.schemas import artifact_names as names
from hqconv.schemas.activation import Activation
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import MAX_SIZE, Grid, check_grid
from hqconv.schemas.input_schema import LayerSpec
from hqconv.schemas.tensors import FLOATS, TensorRef, num_bits
from hqconv.schemas.weight_schema import LayerSchema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hqconv.kernel_layout.transform import KernelForm
    from hqconv.layout_decoder.layout_form import LayoutForm


Header = tuple[dict[str, TensorRef], dict[str, str]]
Note = Callable[[str, str, object, object], None]  # where, what, expected, found
Tensors: TypeAlias = "dict[str, NDArray[Any]]"


class Artifact:
    """An artifact in either layout: the facts of its manifest, computed at the first access, and its files.

    A context manager that closes the files it read. On the Hub, headers are read by range requests; a file whose
    tensors are read is downloaded first.
    """

    def __init__(
        self, root: Path, listing: Listing | None = None, *, is_sealed: bool = False
    ) -> None:
        """Read the manifest as `read_manifest` does.

        listing: of a repo on the Hub, of which `root` has some files. Raises RequestError or VerificationError as
        `read_manifest`.
        """
        self.root = root
        self.listing = listing
        self.placed: dict[str, Path] = {}  # files of a repo that lie outside of `root`
        self.manifest = read_manifest(root, is_sealed=is_sealed)
        self._headers: dict[str, Header] = {}
        self._header_digests: dict[str, str] = {}
        self._rank_files: dict[str, RankFile] = {}
        self._lock = threading.Lock()
        self._descriptors = Descriptors(
            lambda path: os.open(self.fetched(path), os.O_RDONLY | os.O_CLOEXEC)
        )

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were read."""
        self._descriptors.close()

    def header(self, path: str) -> Header:
        """Return tensors and metadata of one file of the artifact, read once.

        Raises VerificationError for a damaged header.
        """
        with self._lock:
            if path not in self._headers:
                try:
                    entries, metadata, digest = self._read_header(path)
                except InputError as error:
                    raise VerificationError(
                        error.what, where=path, expected=error.expected, found=error.found
                    ) from error
                self._headers[path] = entries, metadata
                self._header_digests[path] = digest
            return self._headers[path]

    def header_digest(self, path: str) -> str:
        """Return the SHA-256 of a file's header, its 8 bytes of length included; errors as `header`."""
        self.header(path)
        return self._header_digests[path]

    def _read_header(self, path: str) -> tuple[dict[str, TensorRef], dict[str, str], str]:
        if self.listing is None or path not in self.listing.sizes or (self.root / path).is_file():
            return read_header(self.root / path)
        return parse_header(path, self.listing.read_head(path), self.listing.sizes[path])

    def fetched(self, path: str) -> Path:
        """Return a file's path on this machine; a file of a repo is downloaded first. Raises as `hub.fetch_file`."""
        if path in self.placed:
            return self.placed[path]
        return self.root / path if self.listing is None else self.listing.fetched(self.root, path)

    @cached_property
    def grid(self) -> Grid:
        """The ranks of the artifact."""
        return self.manifest.grid

    @cached_property
    def spec(self) -> ConversionSpec:
        """The spec of the conversion, from the manifest. Raises VerificationError for impossible values."""
        manifest = self.manifest
        kind = manifest.layer_spec
        try:
            spec = ConversionSpec(
                kind.schema,
                manifest.dtype,
                kind.target,
                manifest.grid,
                manifest.layout,
                kind.inputs,
                of_layers=manifest.overrides,
                encoding=EncodingOptions.from_dict(manifest.to_dict()),
                dense=DenseSchemas.from_dict(manifest.request.get("dense")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _impossible("request: dense", error) from error
        except HqconvError as error:
            raise _impossible(error.where, error.found) from error
        if spec.layout == names.CHECKPOINT and spec.grid != Grid():
            raise _impossible("tp, ep", f"{spec.grid} in the checkpoint layout")
        return spec

    def is_shard(self, path: str) -> bool:
        """Return whether a file of the manifest is one of the ordinary model shards."""
        return "/" not in path and path.endswith(".safetensors")

    @cached_property
    def family(self) -> Family:
        """The family whose names the experts have. Raises VerificationError for an unknown one."""
        if self.manifest.family not in BY_NAME:
            raise VerificationError(
                "The manifest names a family that is not known.",
                where=f"{names.MANIFEST}: family",
                expected=", ".join(BY_NAME),
                found=self.manifest.family,
            )
        return BY_NAME[self.manifest.family]

    @property
    def left(self) -> tuple[str, ...]:
        """Layers whose experts were copied unchanged."""
        return self.manifest.left

    def layer_spec_of(self, name: str) -> LayerSpec:
        """Return the kernel specs of one layer, which decide its layout. Raises VerificationError as `spec`."""
        return self.spec.layer_spec_of(name)

    def schema_of(self, name: str) -> LayerSchema:
        """Return the weight schema of one layer's experts; errors as `layer_spec_of`."""
        return self.layer_spec_of(name).schema

    def activation_of(self, name: str) -> Activation:
        """Return the activation between the GEMMs of one layer's experts."""
        return self.layers[name].activation_function

    def knows_activation(self, name: str) -> bool:
        """Return whether the formula of one layer's activation is known."""
        return self.activation_of(name).is_known(self.layers[name].gated)

    def moe_layer(self, name: str) -> MoeLayer:
        """Return one layer as the manifest's facts imply it, without `sources`.

        Raises VerificationError for impossible facts.
        """
        layer = self.layers[name]
        family = self.family
        # a single expert serves every token, whatever top_k says
        if layer.top_k > layer.num_experts > 1:
            raise _impossible(name, f"{layer.num_experts} experts, {layer.top_k} experts per token")
        sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
        try:
            check_grid(
                name,
                *sizes,
                self.schema_of(name),
                self.spec.grid,
                pads_last_rank=family.pads_last_rank,
            )
        except RequestError as error:
            raise _impossible(error.where, f"{error.what} {error.found}") from error
        try:
            source = SourceFormat.from_dict(layer.source_format)
            parts = {
                role: {part: TensorSlice.from_dict(one) for part, one in of_role.items()}
                for role, of_role in layer.source_parts.items()
            }
            if set(parts) != set(family.projections) or any(
                "weight" not in p for p in parts.values()
            ):
                raise ValueError(f"projections {', '.join(parts)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _impossible(f"{name}: source_format, source_parts", error) from error
        return MoeLayer(
            name=name,
            family=family.name,
            index=layer.layer,
            num_experts=layer.num_experts,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            gated=layer.gated,
            top_k=layer.top_k,
            dtype=layer.source_dtype,
            pads_last_rank=family.pads_last_rank,
            format=source,
            projection_names=dict(family.projections),
            slices=parts,
            sources=(),
            activation=self.activation_of(name),
        )

    def linear_weights(self, name: str) -> Iterator[tuple[str, TensorRef]]:
        """Yield the source's tensors of a linear group, by the manifest. Raises VerificationError for other values."""
        assert self.manifest.linear_layers is not None
        entry = self.manifest.linear_layers[name]
        parent = name.rpartition(".")[0]
        if not entry.shapes or entry.source_dtype not in FLOATS or not is_linear_group(name):
            raise _impossible(f"linear_layers: {name}", entry.source_dtype)
        for module, shape in entry.shapes.items():
            is_matrix = len(shape) == 2 and all(
                type(size) is int and 0 < size <= MAX_SIZE for size in shape
            )
            if not is_matrix or not names.is_layer_name(module):
                raise _impossible(f"linear_layers: {name}: shapes", f"{module}: {shape}")
            weight = f"{parent}.{module}.weight"
            num_bytes = math.prod(shape) * num_bits(entry.source_dtype) // 8
            yield weight, TensorRef(weight, entry.source_dtype, tuple(shape), 0, 0, num_bytes)

    def linear_group(self, name: str) -> LinearGroup:
        """Return a linear group as the manifest describes it. Raises VerificationError as `linear_weights`."""
        return linear_group(name, self.manifest.family, [*dict(self.linear_weights(name)).values()])

    def kernel_forms(self, layer: MoeLayer, target: GpuTarget | None) -> dict[str, KernelForm]:
        """Return the kernel form that Humming computes for each GEMM. target: in place of the artifact's own.

        Raises ModuleNotFoundError without Humming, else VerificationError.
        """
        # these load torch: only checks need them
        from hqconv.kernel_layout.transform import is_compatible, kernel_form

        spec = self.spec
        kind = spec.layer_spec_of(layer.name)
        kind = kind if target is None else replace(kind, target=target)
        with _humming_errors(layer.name):
            if not all(map(is_compatible, kind.each)):
                raise _impossible("weight_schema", f"no kernel for {kind}")
            shapes = gemm_shapes(layer, spec.grid.tp, kind.schema)
            return {
                gemm: kernel_form(n, k, kind.of(gemm), layer.has_bias)
                for gemm, (n, k) in shapes.items()
            }

    @property
    def param_dtype(self) -> str:
        return self.manifest.dtype

    @property
    def layers(self) -> dict[str, ManifestLayer]:
        """The manifest's entry of each MoE layer, in its order."""
        return self.manifest.blocks

    # --- files

    def paths(self) -> list[str]:
        """Return all files of the folder or repo, and links to folders, which are not searched; POSIX paths, sorted."""
        if self.listing is not None:
            return sorted(self.listing.sizes)
        found = []
        for folder, folders, files in os.walk(self.root):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            found += [
                (Path(folder) / name).relative_to(self.root).as_posix() for name in (*files, *links)
            ]
        return sorted(found)

    def size_of(self, path: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        if (self.root / path).is_file():
            return (self.root / path).stat().st_size
        return None if self.listing is None else self.listing.sizes.get(path)

    def is_proven_by_hub(self, path: str) -> bool:
        """Return whether a file is not on this machine, but the Hub lists its digest."""
        return (
            self.listing is not None
            and path in self.listing.digests
            and not (self.root / path).is_file()
        )

    def digest_of(self, path: str, keep_on: Callable[[], object] | None = None) -> str:
        """Return a file's SHA-256: of the local file, else the Hub's, else of the downloaded file. Raises OSError.

        keep_on: as in `sha256_of`.
        """
        if self.is_proven_by_hub(path):
            assert self.listing is not None
            return self.listing.digests[path]
        return sha256_of(self.fetched(path), keep_on)

    def forget(self, path: str) -> None:
        """Drop a file of a repo that will be removed here; a read that is under way goes on."""
        self.placed.pop(path, None)
        self._descriptors.drop(path)

    # --- tensors

    def rank_file(self, layer: str, tp_rank: int, ep_rank: int) -> RankFile:
        """Return one rank's file of one layer, by its header, which is read once.

        Raises VerificationError for the file of another rank or layer, or a damaged header.
        """
        path = names.rank_file(layer, tp_rank, ep_rank)
        if path not in self._rank_files:
            entry = self.manifest.files.get(path)
            if entry is None:
                raise VerificationError("The manifest lists no file for a rank.", where=path)
            place = self.placed.get(path, self.root / path)
            header = self.header(path)
            self._rank_files[path] = parse_rank_file(
                place, layer, (tp_rank, ep_rank), entry.sha256, *header
            )
        return self._rank_files[path]

    def rank_forms(
        self, layer: MoeLayer, note: Note, ranks: Iterable[tuple[int, int]] | None = None
    ) -> dict[tuple[str, int, int], LayoutForm]:
        """Compare headers of `ranks` (None: all) with the manifest, note what is wrong, and return the other layouts.

        Keys are (GEMM, TP rank, EP rank).
        """
        good = {}
        spec = self.layer_spec_of(layer.name)
        entries = self.layers[layer.name]
        shapes = gemm_shapes(layer, self.grid.tp, spec.schema)
        for tp_rank, ep_rank in self.grid.ranks if ranks is None else ranks:
            num_local = len(self.grid.local_experts(layer.num_experts, ep_rank))
            try:
                file = self.rank_file(layer.name, tp_rank, ep_rank)
            except VerificationError as error:
                note(error.where, error.what, error.expected, error.found)
                continue
            for gemm, shape in shapes.items():
                entry = entries.gemm(gemm)
                assert entry is not None  # of the kernel layout
                findings = list(file.findings(gemm, spec.of(gemm), entry, num_local))
                if not findings and (form := file.form(gemm, spec.of(gemm), entry)).shape != shape:
                    where = f"{names.MANIFEST}: {layer.name}: {gemm}"
                    what = "A GEMM's shape is not its layer's."
                    findings = [Finding(where, what, shape, form.shape)]
                for finding in findings:
                    note(*finding)
                if not findings:
                    good[gemm, tp_rank, ep_rank] = form
        return good

    def read_input_scale(self, layer: str, gemm: str, tp_rank: int, ep_rank: int) -> float | None:
        """Read the static scale of a GEMM's activations from one rank's file; None where the file has none.

        Raises VerificationError where it is no float32 [1].
        """
        path = names.rank_file(layer, tp_rank, ep_rank)
        inputs = self.layer_spec_of(layer).inputs
        name = names.input_scale(layer, gemm, inputs)
        ref = self.header(path)[0].get(name)
        if ref is None:
            return None
        if (ref.dtype, ref.shape) != ("F32", (1,)):
            raise VerificationError(
                "An activation scale is not one number.",
                where=f"{path}, tensor {name}",
                expected="F32 [1]",
                found=f"{ref.dtype} {list(ref.shape)}",
            )
        import numpy as np

        return float(self._read_bits(path, ref).view(np.float32)[0])

    def _read_bits(self, path: str, ref: TensorRef) -> NDArray[Any]:
        """Read raw bit patterns: unsigned integers as wide as the dtype."""
        import numpy as np

        data = np.empty(ref.num_bytes, np.uint8)
        self.read(path, data.data, ref.offset_bytes)
        return data.view(f"u{max(1, num_bits(ref.dtype) // 8)}")

    def read_module(self, prefix: str, shards: Mapping[str, str]) -> tuple[dict[str, str], Tensors]:
        """Read dtypes and raw bits of the tensors named `prefix` and one more part; `shards` is name → file."""
        dtypes: dict[str, str] = {}
        tensors: Tensors = {}
        for word in ("weight", "weight_scale", "zero_point", "weight_scale_2", "bias"):
            if path := shards.get(prefix + word):
                ref = self.header(path)[0][prefix + word]
                tensors[word] = self._read_bits(path, ref).reshape(ref.shape)
                dtypes[word] = ref.dtype
        return dtypes, tensors

    def shards(self) -> dict[str, str]:
        """Return tensor name → ordinary shard, where some hold quantized tensors; `files` reports damaged headers."""
        found: dict[str, str] = {}
        if self.manifest.is_kernel and not self.manifest.linear_layers:
            return found
        for path in self.manifest.files:
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
                    raise VerificationError(
                        "A file ends too early.", where=path, found=f"end at byte {offset}"
                    )
                buffer = buffer[count:]
                offset = offset + count


def _impossible(key: str, found: object) -> VerificationError:
    return VerificationError(
        "The manifest describes what cannot be, or what this version does not know.",
        where=f"{names.MANIFEST}: {key}",
        found=found,
    )


@contextmanager
def _humming_errors(layer: str) -> Iterator[None]:
    """Turn Humming's errors about an impossible layout, mostly asserts, into VerificationError."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise _impossible(layer, f"Humming: {type(error).__name__}: {error}") from error


def note_error(where: str, error: HqconvError | OSError, note: Note) -> None:
    """Note an error of reading or decoding weights."""
    if isinstance(error, HqconvError):
        inside = f"{where}: {error.where}" if error.where and error.where not in where else where
        note(inside, f"Weights cannot be decoded: {error.what}", error.expected, error.found)
    else:
        note(where, "Weights cannot be read.", "", error.strerror)
