"""The manifest of an artifact, hqconv.json, as a typed value: read and checked once, written from the same type.

The fields of a class are the keys of one JSON object, in the order in which they are written. A field without a default
is required; a field that is None is absent from the file (`_NULLABLE`: null there). `_RANGES` and `_TEXTS` bound the
values by their keys. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import (
    CARD,
    FORMAT_VERSION,
    GEMMS,
    INPUT_SCALE,
    JOURNAL,
    KERNEL,
    LAYOUTS,
    MANIFEST,
    MIXED_VERSION,
    is_layer_name,
)
from hqconv.schemas.gpu_target import target_of_record
from hqconv.schemas.grid import EVEN, MAX_COUNT, MAX_SIZE, Grid
from hqconv.schemas.input_schema import A16, LayerSpec, inputs_of
from hqconv.schemas.untrusted_files import (
    MAX_DOCUMENT_BYTES,
    MAX_LIST_BYTES,
    close_file,
    found_at,
    parse_json,
    read_regular,
)
from hqconv.schemas.weight_schema import PARAM_DTYPES, LayerSchema, layer_schema_of_record

_BYTES_PER_NAME = 16  # quotes, spaces and punctuation around a tensor's name
_AGAIN = "Convert the source again, or copy the artifact again from where it is whole."
_DIGEST = "digest"
_DIGEST_FIELD = f',\n  "{_DIGEST}": "'.encode()
_END = b"\n}\n"


# --- a JSON object with typed fields ------------------------------------------------------------------------

_RANGES = {
    **dict.fromkeys(("tp", "ep", "num_experts"), (1, MAX_COUNT)),
    "redundant_experts": (0, MAX_COUNT),
    **dict.fromkeys(("hidden_size", "intermediate_size", "top_k"), (1, MAX_SIZE)),
    "layer": (0, MAX_SIZE),
    "size_bytes": (0, 1 << 60),
}
_DIGEST_TEXT = (r"[0-9a-f]{64}", "64 hexadecimal digits")
_VERSION = (r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+[\w.]+)?", "a version")
_NAME = (r"(?s).+", "a name")
_TEXTS = {
    **dict.fromkeys(
        ("sha256", "header_sha256", "hub_sha256", "index_sha256", "manifest_sha256", "fingerprint"),
        _DIGEST_TEXT,
    ),
    **dict.fromkeys(("hqconv_version", "humming_kernels_version"), _VERSION),
    **dict.fromkeys(("schema_name", "input_schema"), _NAME),
    "layout": ("|".join(LAYOUTS), " or ".join(LAYOUTS)),
    "dtype": ("|".join(PARAM_DTYPES), " or ".join(PARAM_DTYPES)),
    "revision": (r"[0-9a-f]{40}", "a commit of 40 hexadecimal digits"),
}
_NULLABLE = {"is_null": True}  # metadata of a field that is null in the file where it is None
_FACT = {"is_key": False}  # metadata of a field that is a fact about the file, not a key


class Entry:
    """A JSON object of the manifest. Unknown keys are ignored: a newer hqconv may add some (`verify` names them)."""

    @classmethod
    def from_dict(cls, document: Any, where: str = MANIFEST, **facts: Any) -> Self:
        """Check a JSON object and return it as a value. facts: of the fields that are no keys.

        Raises VerificationError, which names the position of the first wrong value.
        """
        if not isinstance(document, dict):
            raise damaged(where, "an object", type(document).__name__)
        values = {}
        for one, kind in _keys(cls):
            is_nullable = one.metadata.get("is_null")
            if one.name not in document:
                if one.default is MISSING or is_nullable:
                    raise damaged(f"{where}: {one.name}", _name_of(kind), "no such key")
            elif document[one.name] is not None or not is_nullable:
                values[one.name] = _checked(kind, document[one.name], f"{where}: {one.name}")
                _check_value(one.name, values[one.name], f"{where}: {one.name}")
        return cls(**values, **facts)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        values = ((one, getattr(self, one.name)) for one, _ in _keys(type(self)))
        return {
            one.name: _document(value)
            for one, value in values
            if value is not None or one.metadata.get("is_null")
        }


_Keys = tuple[tuple[Field[Any], Any], ...]
_KEYS: dict[type, _Keys] = {}


def _keys(cls: type) -> _Keys:
    """Return the fields of an entry that are keys, with their types (without `None`)."""
    if cls not in _KEYS:
        hints = get_type_hints(cls)
        keys = [one for one in fields(cls) if one.metadata.get("is_key", True)]
        _KEYS[cls] = tuple((one, _without_none(hints[one.name])) for one in keys)
    return _KEYS[cls]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    return next(one for one in get_args(kind) if one is not type(None))


def _name_of(kind: Any) -> str:
    kind = get_origin(kind) or kind
    return "dict" if issubclass(kind, Entry) else str(kind.__name__)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Check a JSON value against an annotation: str, int, bool, float, dict[str, …], list[…], an Entry or Any."""
    if kind is Any:
        return value
    outer = get_origin(kind) or kind
    inner = (get_args(kind) or (Any,))[-1]
    if issubclass(outer, Entry):
        return outer.from_dict(value, where)
    if type(value) is not outer:
        shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
        raise damaged(where, outer.__name__, shown)
    if outer is dict and inner is not Any:
        if isinstance(inner, type) and not issubclass(inner, Entry) and _are(value.values(), inner):
            return value  # names of tensors: there may be a million
        return {key: _checked(inner, one, f"{where}: {key}") for key, one in value.items()}
    if outer is list and inner is not Any and not _are(value, inner):
        return [_checked(inner, one, where) for one in value]
    return value


def _check_value(key: str, value: Any, where: str) -> None:
    """Check the range of a number, and the form of a text."""
    if key in _RANGES and not _RANGES[key][0] <= value <= _RANGES[key][1]:
        raise damaged(where, f"from {_RANGES[key][0]} to {_RANGES[key][1]}", value)
    if key in _TEXTS and re.fullmatch(_TEXTS[key][0], value) is None:
        raise damaged(where, _TEXTS[key][1], repr(value)[:80])


def _are(values: Any, kind: type) -> bool:
    return set(map(type, values)) <= {kind}


def _document(value: Any) -> Any:
    if isinstance(value, Entry):
        return value.to_dict()
    if isinstance(value, list):
        return [_document(one) for one in value] if value and isinstance(value[0], Entry) else value
    if isinstance(value, dict) and isinstance(next(iter(value.values()), None), Entry):
        return {key: _document(one) for key, one in value.items()}
    return value


def damaged(where: object, expected: str, found: object) -> VerificationError:
    """Return the error for an impossible value in a manifest."""
    return VerificationError(
        "The artifact's manifest is damaged.",
        where=where,
        expected=expected,
        found=found,
        remedy=_AGAIN,
    )


# --- the objects of a manifest ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceFileEntry(Entry):
    """A weight file of the source. sha256: if it was hashed. hub_sha256: as the Hub lists it."""

    name: str
    size_bytes: int
    header_sha256: str
    sha256: str | None = None
    hub_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class ManifestSource(Entry):
    """The source of a conversion. revision: the commit of a Hub repo, None for a folder."""

    name: str
    revision: str | None = field(default=None, metadata=_NULLABLE)
    quantization_config: dict[str, Any] | None = field(default=None, metadata=_NULLABLE)
    index_sha256: str | None = field(default=None, metadata=_NULLABLE)
    files: list[SourceFileEntry]


@dataclass(frozen=True, kw_only=True)
class CalibrationEntry(Entry):
    """The calibration of the quantizer gptq: see `planning.calibration.Calibration`."""

    name: str
    sha256: str
    num_tokens: int
    context_length: int
    device: str
    torch: str
    transformers: str
    lines: str


@dataclass(frozen=True, kw_only=True)
class FileEntry(Entry):
    """Size and digest of a file of the artifact."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ProjectionError(Entry):
    """Relative Frobenius error of one projection of a layer.

    num_experts_requantized, num_groups, num_exact_groups: where the source is quantized. largest_scale_change: where
    scales were rounded. relative_output_error: of the outputs on a calibration's tokens.
    num_experts_without_tokens, num_experts_with_few_tokens: of a calibration, of w2.
    """

    relative_error: float
    worst_expert: int
    worst_relative_error: float
    num_experts_requantized: int | None = None
    num_groups: int | None = None
    num_exact_groups: int | None = None
    largest_scale_change: float | None = None
    relative_output_error: float | None = None
    num_experts_without_tokens: int | None = None
    num_experts_with_few_tokens: int | None = None


GEMM_SIZES = ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")  # names in Humming's LayerConfig


@dataclass(frozen=True, kw_only=True)
class GemmEntry(Entry):
    """Kernel layout of one GEMM: sizes of a rank's matrix, layout flags by Humming's names, static activation scale.

    fingerprint: of the layout, by which versions of Humming are told apart (`kernel_layout/fingerprint`).
    """

    shape_n: int
    shape_k: int
    pad_shape_n: int
    pad_shape_k: int
    flags: dict[str, bool]
    fingerprint: str
    input_scale: float | None = None

    @property
    def has_fused_exponents(self) -> bool:
        """True if exponents of e8m0 scales were moved into the codes, which were then rounded again per rank."""
        return self.flags.get("use_fused_e8m0_scale", False)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by their names in Humming's LayerConfig."""
        return {key: getattr(self, key) for key in GEMM_SIZES}


@dataclass(frozen=True, kw_only=True)
class ManifestLayer(Entry):
    """One MoE layer, a value of the key `blocks`.

    The first six fields are those of a layer that is quantized in another way than the artifact's others.
    intermediate_order: `g_idx` where each expert's intermediate columns (w2's columns; rows of gate and up) were
    sorted by w2's groups. w13, w2: of the kernel layout.
    """

    schema_name: str | None = None
    weight_schema: dict[str, Any] | None = None
    input_schema: str | None = None
    activation_schema: dict[str, Any] | None = None
    target: str | None = None
    cuda: str | None = None
    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    activation_parameters: Any = None  # checked by `activation_function`
    activation_is_known: bool | None = None
    gated: bool
    top_k: int
    w13_order: list[str]
    intermediate_order: str | None = None
    source_dtype: str
    source_format: dict[str, Any]
    source_parts: dict[str, Any]
    conversion: str
    quantization_error: dict[str, ProjectionError]
    w13: GemmEntry | None = None
    w2: GemmEntry | None = None

    @property
    def is_overridden(self) -> bool:
        """True if the layer is quantized in another way than the artifact's others."""
        return self.weight_schema is not None

    def gemm(self, name: str) -> GemmEntry | None:
        """Return the entry of the GEMM `w13` or `w2`."""
        return self.w13 if name == "w13" else self.w2

    @cached_property
    def activation_function(self) -> Activation:
        """Return the activation with its numbers. Raises ValueError for numbers that the name does not have."""
        return Activation.from_dict(
            {"activation": self.activation, "activation_parameters": self.activation_parameters}
        )

    def errors(self) -> dict[str, dict[str, Any]]:
        """Return projection → the JSON object of its quantization error."""
        return {role: error.to_dict() for role, error in self.quantization_error.items()}


@dataclass(frozen=True, kw_only=True)
class ManifestLinear(Entry):
    """A group of quantized linear layers, a value of the key `linear_layers`. shapes: module → [out, in]."""

    source_dtype: str
    shapes: dict[str, list[int]]
    quantization_error: dict[str, ProjectionError]


@dataclass(frozen=True, kw_only=True)
class TensorAccounting(Entry):
    """Names of the source's tensors: converted → layer, copied, dropped → reason. There may be a million."""

    converted: dict[str, str]
    copied: list[str]
    dropped: dict[str, str]


class Alteration(NamedTuple):
    """Difference between a manifest's bytes and its own digest."""

    what: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Entry):
    """The description of an artifact. request: the options that decide its bytes. blocks: MoE layers by name.

    Of a manifest that was read also path, the SHA-256 of the file, and `alteration`: the file is not as it was sealed.
    """

    format_version: int
    hqconv_version: str
    humming_kernels_version: str
    source: ManifestSource
    request: dict[str, Any]
    layout: str
    schema_name: str
    weight_schema: dict[str, Any]
    input_schema: str
    activation_schema: dict[str, Any] | None = None
    round_scales: bool | None = None
    quantizer: str | None = None
    quantizer_version: int | None = None
    calibration: CalibrationEntry | None = None
    dtype: str
    target: str
    cuda: str | None = None
    tp: int
    tp_split: str | None = None
    ep: int
    expert_placement: str
    redundant_experts: int
    left_blocks: list[str] | None = None
    family: str
    warnings: list[str] | None = None
    blocks: dict[str, ManifestLayer]
    linear_layers: dict[str, ManifestLinear] | None = None
    files: dict[str, FileEntry]
    tensors: TensorAccounting
    digest: str | None = None
    path: Path = field(default=Path(MANIFEST), metadata=_FACT)
    sha256: str = field(default="", metadata=_FACT)
    alteration: Alteration | None = field(default=None, metadata=_FACT)

    @property
    def is_kernel(self) -> bool:
        """True if the experts are in the kernel layout, not the checkpoint layout."""
        return self.layout == KERNEL

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the MoE layers whose experts were copied unchanged."""
        return tuple(self.left_blocks or ())

    @cached_property
    def grid(self) -> Grid:
        """The ranks that the artifact was made for."""
        return Grid(
            self.tp, self.ep, self.expert_placement, self.redundant_experts, self.tp_split or EVEN
        )

    @cached_property
    def layer_spec(self) -> LayerSpec:
        """Return weights, activations and GPU of every layer that is not overridden. Raises VerificationError."""
        return self._layer_spec(self, "")

    @cached_property
    def overrides(self) -> dict[str, LayerSpec]:
        """Return layer name → weights, activations and GPU, of the layers that differ. Raises VerificationError."""
        return {
            name: self._layer_spec(layer, f"blocks: {name}: ")
            for name, layer in self.blocks.items()
            if layer.is_overridden
        }

    def _layer_spec(self, of: Manifest | ManifestLayer, inside: str) -> LayerSpec:
        where = f"{self.path}: {inside}"
        schema = _weight_schema(of.schema_name or "", of.weight_schema or {}, where)
        name = of.input_schema or ""
        numbers = of.activation_schema
        try:
            if (numbers is None) != (name == A16.name):
                raise RequestError(
                    "Activations are named without their schema.", where="input_schema", found=name
                )
            inputs = A16 if numbers is None else inputs_of(name, numbers, where="activation_schema")
            return LayerSpec(schema, self.dtype, target_of_record(of.target or "", of.cuda), inputs)
        except (RequestError, TypeError) as error:
            key = getattr(error, "where", "activation_schema").removeprefix("--")
            expected = getattr(error, "expected", "")
            found = getattr(error, "found", error)
            raise damaged(f"{where}{key}", expected, found) from error

    def errors(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return layer or linear group → projection → the JSON object of its quantization error."""
        return {
            name: {role: error.to_dict() for role, error in errors.items()}
            for name, errors in self.projection_errors().items()
        }

    def projection_errors(self) -> dict[str, dict[str, ProjectionError]]:
        """Return layer or linear group → projection → its quantization error."""
        found = {name: layer.quantization_error for name, layer in self.blocks.items()}
        linear = self.linear_layers or {}
        return found | {name: group.quantization_error for name, group in linear.items()}

    def missing_files(self, size_of: Callable[[str], int | None]) -> list[str]:
        """Return the listed files that are missing or have another size; people may edit the model card.

        size_of: returns the bytes of a file of the artifact, None where there is none.
        """
        return [
            name
            for name, entry in self.files.items()
            if (size := size_of(name)) is None or (name != CARD and size != entry.size_bytes)
        ]


def _weight_schema(name: str, fields: dict[str, Any], where: str) -> LayerSchema:
    try:
        return layer_schema_of_record(name, fields)
    except (HqconvError, TypeError) as error:
        key = getattr(error, "where", "")
        found = getattr(error, "found", error)
        raise damaged(
            f"{where}weight_schema{f': {key}' if key else ''}",
            "the fields of a weight schema",
            found,
        ) from error


# --- the structure of a manifest, and differences of documents -------------------------------------------------

ABSENT = "absent"
# Keys of a manifest that are measured, or sentences for people: nothing derives them from request and source.
_NOT_STRUCTURE = ("hqconv_version", "humming_kernels_version", "warnings", "files", "digest")
_MEASURED_OF_SOURCE_FILES = ("sha256", "hub_sha256")


class Difference(NamedTuple):
    """A value that is not the expected one. key: its path in a document, with colons."""

    key: str
    expected: object
    found: object


def differences(expected: object, found: object, key: str = "") -> Iterator[Difference]:
    """Compare two JSON values recursively. Objects differ by keys, lists of names by names, 4 differs from 4.0."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name in dict.fromkeys((*expected, *found)):
            inside = f"{key}: {name}" if key else str(name)
            yield from differences(expected.get(name, ABSENT), found.get(name, ABSENT), inside)
    elif _is_list_of_objects(expected) and _is_list_of_objects(found):
        yield from differences(_by_name(expected), _by_name(found), key)
    elif json.dumps(expected) != json.dumps(found):
        yield Difference(key, expected, found)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _by_name(items: Any) -> dict[str, Any]:
    return {str(item.get("name", number)): item for number, item in enumerate(items)}


def structure(manifest: Manifest) -> dict[str, Any]:
    """Return the keys of a manifest that follow from request and source, without measurements and sentences."""
    document = manifest.to_dict()
    for key in _NOT_STRUCTURE:
        document.pop(key, None)
    source = document["source"]
    if source["revision"] is None:
        del source["name"]  # a folder may be renamed
    for file in source["files"]:
        for key in _MEASURED_OF_SOURCE_FILES:
            file.pop(key, None)
    for layer in (*document["blocks"].values(), *document.get("linear_layers", {}).values()):
        del layer["quantization_error"]
        for gemm in GEMMS:
            if gemm in layer:
                layer[gemm].pop(INPUT_SCALE, None)
    tensors = document["tensors"]
    tensors["copied"] = dict.fromkeys(tensors["copied"])
    tensors["dropped"] = dict.fromkeys(tensors["dropped"])
    return document


# --- reading ------------------------------------------------------------------------------------------------


def is_artifact(root: Path) -> bool:
    """Return whether the folder holds a finished artifact, damaged or not."""
    return (root / MANIFEST).is_file()


def is_unfinished(root: Path) -> bool:
    """Return whether the folder holds a conversion that was interrupted (or is still running)."""
    return (root / JOURNAL).is_file() and not is_artifact(root)


def read_manifest(root: Path, *, is_sealed: bool = False, allow_links: bool = False) -> Manifest:
    """Read and check the manifest of the artifact at `root`: types, ranges, schemas, and the names of its files.

    is_sealed: also refuse a file whose bytes are not those of its own digest (`verify` reports `alteration` instead).
    allow_links: of files that are only removed, never read.
    Raises RequestError where `root` is no artifact or was made by a newer hqconv, VerificationError where the
    conversion is unfinished or the manifest is damaged, also where a listed file lies outside the artifact.
    """
    path = root / MANIFEST
    raw, document = _read(root, path)
    _check_version(path, document)
    facts = {"sha256": hashlib.sha256(raw).hexdigest(), "alteration": _alteration(raw, document)}
    manifest = Manifest.from_dict(document, str(path), path=path, **facts)
    _check_size(manifest, len(raw))
    _check_options(manifest)
    _check_layers(manifest)
    _check_files(root, manifest, allow_links=allow_links)
    if is_sealed and manifest.alteration is not None:
        what, expected, found = manifest.alteration
        raise VerificationError(
            what, where=f"{path}: {_DIGEST}", expected=expected, found=found, remedy=_AGAIN
        )
    return manifest


def _read(root: Path, path: Path) -> tuple[bytes, Any]:
    """Read the bytes of the file, and its JSON document."""
    if is_unfinished(root):
        raise VerificationError(
            "The conversion is unfinished: this is not an artifact yet.",
            where=root,
            remedy="Run the `hqconv convert` command that wrote it once more, with --resume.",
        )
    if not path.is_file():
        close = "" if root.is_dir() else close_file(root, is_folder=True)
        raise RequestError(
            "This is not an hqconv artifact.",
            where=root,
            expected=f"a folder with {MANIFEST}",
            found=found_at(path) if root.is_dir() else "no such folder",
            remedy=f"{close} Give the OUT of `hqconv convert`; where the manifest is lost, convert again.".strip(),
        )
    try:
        raw = read_regular(path, MAX_LIST_BYTES)
        return raw, parse_json(raw)
    except OSError as error:
        raise damaged(path, "a readable file", error.strerror) from error
    except ValueError as error:  # not UTF-8, not JSON, too deep
        raise damaged(path, "a JSON document", error) from error


def _check_version(path: Path, document: Any) -> None:
    if not isinstance(document, dict):
        raise damaged(path, "a JSON object", type(document).__name__)
    version = document.get("format_version")
    if type(version) is int and version > MIXED_VERSION:
        raise RequestError(
            "The artifact was made by a newer hqconv.",
            where=f"{path}: format_version",
            expected=f"at most {MIXED_VERSION}",
            found=f"{version} (hqconv {document.get('hqconv_version', '?')})",
            remedy="Upgrade hqconv.",
        )
    if type(version) is not int or version < FORMAT_VERSION:
        raise damaged(f"{path}: format_version", str(FORMAT_VERSION), repr(version))


def _check_size(manifest: Manifest, num_bytes: int) -> None:
    """Refuse a large manifest, unless the names of tensors explain its size: there may be a million."""
    if num_bytes <= MAX_DOCUMENT_BYTES:
        return
    tensors = manifest.tensors
    texts = list(tensors.copied)
    for names in (tensors.converted, tensors.dropped):
        texts += [*names, *names.values()]
    name_bytes = sum(map(len, texts)) + _BYTES_PER_NAME * len(texts)
    if num_bytes - name_bytes > MAX_DOCUMENT_BYTES:
        expected = f"at most {MAX_DOCUMENT_BYTES} bytes besides the names of tensors"
        raise damaged(manifest.path, expected, f"{num_bytes} bytes")


def _check_options(manifest: Manifest) -> None:
    if manifest.round_scales is False:
        raise damaged(f"{manifest.path}: round_scales", "true, or no such key", "false")
    try:
        manifest.grid  # noqa: B018 - raises for too many ranks, or an unknown placement
    except RequestError as error:
        key = error.where.replace("--", "").replace("-", "_")
        raise damaged(f"{manifest.path}: {key}", error.expected, error.found) from error


def _check_layers(manifest: Manifest) -> None:
    """Check what every reader uses of layers; that they are those of the request is for `artifact/expected`."""
    path = manifest.path
    names = (*manifest.blocks, *manifest.left, *(manifest.linear_layers or ()))
    for name in names:  # names become parts of file names
        if not is_layer_name(name):
            expected = "names of modules: words with dots between"
            raise damaged(f"{path}: blocks, left_blocks", expected, repr(name)[:80])
    manifest.layer_spec, manifest.overrides  # noqa: B018 - raise where they cannot be built
    for name, layer in manifest.blocks.items():
        where = f"{path}: blocks: {name}"
        for key in ("name", "decoder"):
            _checked(str, layer.source_format.get(key), f"{where}: source_format: {key}")
        for gemm in GEMMS if manifest.is_kernel else ():
            if layer.gemm(gemm) is None:
                raise damaged(f"{where}: {gemm}", "an object", "no such key")
        try:
            layer.activation_function  # noqa: B018 - raises
        except ValueError as error:
            raise damaged(where, "the activation's numbers", error) from error


def is_path_inside(path: str) -> bool:
    """Return whether a file name is a relative path downwards from the artifact in normal form."""
    is_posix = path == PurePosixPath(path).as_posix() and "\0" not in path
    return is_posix and not {"", ".", ".."}.intersection(path.split("/"))


def _check_files(root: Path, manifest: Manifest, *, allow_links: bool) -> None:
    """Check that listed files lie in the artifact, also after following links of files and folders.

    The Hub's cache has its files in `blobs`, beside `snapshots` with links to them.
    """
    for name in manifest.files:
        if not is_path_inside(name):
            expected = "a path inside the artifact, with / between folders"
            raise damaged(f"{manifest.path}: files: {name}", expected, repr(name)[:80])
    if allow_links:
        return
    folders = {folder for name in manifest.files for folder in PurePosixPath(name).parents}
    for name in sorted({*manifest.files, *map(str, folders)} - {"."}):
        try:
            is_link = stat.S_ISLNK(os.lstat(root / name).st_mode)
        except (OSError, ValueError):  # no such file: every reader of files reports it
            continue
        target = Path(os.path.realpath(root / name))
        if not is_link or target.is_relative_to(root.resolve()):
            continue
        if target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir():
            continue
        expected = "a file in the artifact, or of the Hub's cache"
        raise damaged(f"{manifest.path}: files: {name}", expected, f"a link to {target}")


# --- the digest of the manifest, its last field -------------------------------------------------------------


def _alteration(raw: bytes, document: Mapping[str, Any]) -> Alteration | None:
    """Compare a manifest's bytes with its own digest."""
    body, key, rest = raw.rpartition(_DIGEST_FIELD)
    is_end = (
        key
        and rest.endswith(b'"' + _END)
        and len(rest) == 2 * hashlib.sha256().digest_size + 1 + len(_END)
    )
    found = hashlib.sha256(body).hexdigest() if is_end else "another end of the file"
    if document.get(_DIGEST) == found:
        return None
    return Alteration(
        "The manifest's bytes are not those that its digest was made of.",
        f"sha256 {str(document.get(_DIGEST))[:80]}, as the manifest's last field",
        found,
    )


def sealed(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a document with `digest` as its last field: the SHA-256 of all bytes before that field.

    A digest that the document has already is replaced.
    """
    body = json_bytes(
        {key: value for key, value in document.items() if key != _DIGEST}
    ).removesuffix(_END)
    return body + _DIGEST_FIELD + hashlib.sha256(body).hexdigest().encode() + b'"' + _END


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Encode a JSON document as in the artifact's files: the bytes of `json.dumps` with an indent of 2."""
    return (_indented(document, "\n") + "\n").encode()


_SCALARS = {str, int, float, bool, type(None)}


def _indented(value: Any, newline: str) -> str:
    """Encode a JSON value. newline: with the spaces of the line that it begins on.

    With an indent, Python's encoder takes a few µs for every value. An object or list of plain values is encoded at
    once, with the line break as a part of its separator: there may be a million names.
    """
    if not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    inner = f"{newline}  "
    values = value.values() if isinstance(value, dict) else value
    if set(map(type, values)) <= _SCALARS:
        text = json.dumps(value, ensure_ascii=False, separators=(f",{inner}", ": "))
        return f"{text[0]}{inner}{text[1:-1]}{newline}{text[-1]}"
    items = [_indented(one, inner) for one in values]
    start, end = "[]"
    if isinstance(value, dict):
        keys = (json.dumps({key: 0}, ensure_ascii=False)[1:-2] for key in value)
        items = [f"{key}{text}" for key, text in zip(keys, items, strict=True)]
        start, end = "{}"
    return f"{start}{inner}{f',{inner}'.join(items)}{newline}{end}"
