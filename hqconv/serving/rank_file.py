"""One rank's file of one MoE layer: its header, compared with the manifest before any tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import HqconvError, InputError, VerificationError
from hqconv.io.hub import cached_digest
from hqconv.io.safetensors_header import read_header
from hqconv.kernel_layout.compatibility import config_entries
from hqconv.layout_decoder.layout_form import expected_tensors, read_config
from hqconv.schemas import artifact_names as names
from hqconv.schemas.input_schema import STATIC_SCALES
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.tensors import TensorRef
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView

_BIAS = "bias"
_AGAIN = "Copy the artifact again from where it is whole, or convert the model again."


@dataclass(frozen=True)
class RankFile:
    """Rank file: tensors by the names that layers have (`w13_weight` …), and Humming's LayerConfig of each GEMM."""

    path: Path
    name: str
    layer: str
    sha256: str
    tensors: dict[str, TensorRef]
    configs: dict[str, dict[str, Any]]


def open_rank_file(view: ArtifactView, path: Path, layer: str, name: str) -> RankFile:
    """Read the header of the rank file `name` of a layer, which lies at `path`.

    Raises VerificationError if its size, tensors or LayerConfigs differ from the manifest; its digest too where the
    Hub's cache tells it.
    """
    if name not in view.files:
        raise _damaged(name, "a file that the manifest lists", "none of that name")
    size_bytes, sha256 = view.files[name]
    if (cached := cached_digest(path)) not in (None, sha256):
        raise _damaged(name, f"sha256 {sha256}", f"{cached}, by the name of its bytes in the Hub's cache")
    try:
        if path.stat().st_size != size_bytes:
            raise _damaged(name, f"{size_bytes} bytes", f"{path.stat().st_size} bytes")
        entries, metadata, _ = read_header(path)
    except (OSError, InputError) as error:
        raise _damaged(name, "a readable safetensors file", error) from error
    if (other := names.other_rank(name, metadata)) is not None:
        raise _damaged(name, f"the file of rank {name.split('/')[-2]}", f"that of {other}")
    tensors, prefix = {}, f"{layer}."
    for full, ref in entries.items():
        own = full.removeprefix(prefix)
        if own == full or own.partition("_")[0] not in names.GEMMS:
            raise _damaged(name, f"tensors named {prefix}w13_… and {prefix}w2_…", full)
        tensors[own] = ref
    configs = {gemm: _config(name, gemm, metadata) for gemm in names.GEMMS}
    for gemm, config in configs.items():
        _check_input_scale(name, gemm, view.layers[layer].kernel_spec, tensors)
        _check_config(name, gemm, config, view.layers[layer], tensors)
    return RankFile(path, name, layer, sha256, tensors, configs)


def check_digest(file: RankFile) -> None:
    """Hash the whole file. Raises VerificationError if the digest is not the manifest's, or the file is unreadable."""
    check_sha256(file.path, file.name, file.sha256)


def check_sha256(path: Path, name: str, sha256: str) -> None:
    """Hash the file `name` of an artifact, likewise."""
    try:
        with path.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(name, "a readable file", error) from error
    if found != sha256:
        raise _damaged(name, f"sha256 {sha256}", found)


def _config(name: str, gemm: str, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        document = json.loads(metadata[gemm])
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(name, f"a layer config for {gemm} in the metadata", error) from error
    if not isinstance(document, dict):
        raise _damaged(name, f"a layer config for {gemm} in the metadata", document)
    return document


def _check_config(
    name: str, gemm: str, config: Mapping[str, Any], layer: ArtifactLayer, tensors: Mapping[str, TensorRef]
) -> None:
    """Compare a LayerConfig, target and formats too, with the manifest, and its number of experts with the tensors'."""
    has_bias = f"{gemm}_{_BIAS}" in tensors
    facts = {**config_entries(layer.kernel_spec), **layer.shapes[gemm], "has_bias": has_bias}
    for key, value in facts.items():
        if config.get(key) != value:
            raise _damaged(name, f"{gemm} of {key} {value}", config.get(key))
    own = {key: ref for key, ref in tensors.items() if key.startswith(f"{gemm}_") and not names.is_input_scale(key)}
    if f"{gemm}_weight" not in own:
        raise _damaged(name, f"a tensor {gemm}_weight", ", ".join(tensors) or "no tensors")
    for key, ref in own.items():
        if ref.shape[:1] != (config.get("num_experts"),):
            raise _damaged(name, f"{key} of {config.get('num_experts')} experts", list(ref.shape))
    try:
        form = read_config(config, layer.flags[gemm], has_row_scale=layer.kernel_spec.schema.has_row_scale)
    except HqconvError as error:
        raise _damaged(name, f"a layer config of {gemm} that agrees with the manifest's flags", error) from error
    for tensor, (dtype, shape) in expected_tensors(form).items():
        stored = tensors.get(f"{gemm}_{tensor}")
        found = "absent" if stored is None else f"{stored.dtype} {list(stored.shape[1:])}"
        if found != f"{dtype} {list(shape)}":
            raise _damaged(name, f"{gemm}_{tensor} of {dtype} {list(shape)} for each expert", found)


def _check_input_scale(name: str, gemm: str, kernel_spec: KernelSpec, tensors: Mapping[str, TensorRef]) -> None:
    """Check that a GEMM has a static activation scale, of the name that Humming has for it, if the manifest says so."""
    for scale in STATIC_SCALES.values():
        key = f"{gemm}_{scale}"
        ref = tensors.get(key)
        found = "absent" if ref is None else f"{ref.dtype} {list(ref.shape)}"
        expected = "F32 [1]" if kernel_spec.inputs.static_scale == scale else "absent"
        if found != expected:
            raise _damaged(name, f"{key}: {expected}", found)


def _damaged(name: str, expected: str, found: object) -> VerificationError:
    what = "A rank file of the artifact is damaged, or belongs to another one."
    return VerificationError(what, where=name, expected=expected, found=found, remedy=_AGAIN)
