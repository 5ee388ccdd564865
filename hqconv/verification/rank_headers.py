"""The `files` check of headers: rank files and packed experts against the layout that the manifest implies.

And of static activation scales: rank files against the manifest, and for `weights` the manifest against the source.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hqconv.artifact.reader import Artifact
from hqconv.conversion.collect_input_scales import InputScales, reduce_scales
from hqconv.errors import HqconvError, NetworkError, VerificationError
from hqconv.kernel_layout.fingerprint import layout_fingerprint
from hqconv.kernel_layout.transform import KernelForm
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.verification.result import CheckResult, compare_dicts, compare_names

SUFFIX = ".safetensors"
_WHAT = "A static activation scale is not the {}."


def check_ranks(
    artifact: Artifact,
    layers: Mapping[str, MoeLayer],
    readable: Collection[str],
    result: CheckResult,
) -> None:
    """Check that every rank has one file of every layer, with the tensors and LayerConfigs that the facts imply.

    readable: paths of the files whose headers can be read.
    """
    expected_paths: set[str] = set()
    for layer in layers.values():
        forms = _kernel_forms(artifact, layer, result)
        for tp_rank, ep_rank in artifact.grid.ranks:
            path = names.rank_file(layer.name, tp_rank, ep_rank)
            expected_paths.add(path)
            if path not in artifact.manifest.files:
                result.add(
                    path, "A rank has no file of a layer.", "listed in the manifest", "not listed"
                )
            elif path in readable:
                _check_rank_file(artifact, layer, (tp_rank, ep_rank), forms, result)
    for path in artifact.manifest.files:
        if layers and "/" in path and path.endswith(SUFFIX) and path not in expected_paths:
            what = "A weight file belongs to no rank and layer of the manifest."
            result.add(path, what, "not listed", "listed")


def _kernel_forms(
    artifact: Artifact, layer: MoeLayer, result: CheckResult
) -> dict[str, KernelForm]:
    """Compare the manifest's entries of a layer with Humming's forms, and return these; empty if there are none."""
    try:
        forms = artifact.kernel_forms(layer)
    except VerificationError as error:
        result.add_error(error)
        return {}
    for gemm, form in forms.items():
        entry = artifact.layers[layer.name].gemm(gemm)
        expected = {
            key: form.config[key] for key in ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")
        } | form.flags
        expected["fingerprint"] = layout_fingerprint(artifact.layer_spec_of(layer.name).of(gemm))
        found: dict[str, Any] = {}
        if entry is not None:
            found = {**entry.sizes, **entry.flags, "fingerprint": entry.fingerprint}
        if (
            entry is not None
            and entry.input_scale is not None
            and not is_static(artifact, layer.name)
        ):
            found[names.INPUT_SCALE] = entry.input_scale
        where = f"{names.MANIFEST}: {layer.name}: {gemm}"
        compare_dicts(
            where, "The manifest's words on a GEMM are not Humming's.", expected, found, result
        )
    return forms


def _check_rank_file(
    artifact: Artifact,
    layer: MoeLayer,
    rank: tuple[int, int],
    forms: Mapping[str, KernelForm],
    result: CheckResult,
) -> None:
    spec, num_local = (
        artifact.layer_spec_of(layer.name),
        len(artifact.grid.local_experts(layer.num_experts, rank[1])),
    )
    path = names.rank_file(layer.name, *rank)
    try:
        file = artifact.rank_file(layer.name, *rank)
    except VerificationError as error:
        result.add_error(error)
        return
    for gemm in names.GEMMS:
        entry = artifact.layers[layer.name].gemm(gemm)
        findings = (
            [] if entry is None else list(file.findings(gemm, spec.of(gemm), entry, num_local))
        )
        for finding in findings:
            result.add(*finding)
        if gemm not in forms or findings:
            continue
        what, config = (
            "A layer config is not Humming's.",
            {**forms[gemm].config, "num_experts": num_local},
        )
        compare_dicts(f"{path}, metadata {gemm}", what, config, file.configs[gemm], result)
        expected = {
            name: (one.dtype, (num_local, *one.shape)) for name, one in forms[gemm].tensors.items()
        }
        _compare_tensors(f"{path}, {gemm}", file.tensors_of(gemm), expected, result)


def _compare_tensors(
    where: str,
    found: Mapping[str, Any],
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    result: CheckResult,
) -> None:
    """Compare dtypes and shapes of tensors; names are compared elsewhere."""
    for name in sorted(expected.keys() & found.keys()):
        ref, (dtype, shape) = found[name], expected[name]
        if (ref.dtype, ref.shape) != (dtype, shape):
            what, text = "A tensor has another dtype or shape.", f"{ref.dtype} {list(ref.shape)}"
            result.add(f"{where}, tensor {name}", what, f"{dtype} {list(shape)}", text)


def check_packed(
    artifact: Artifact,
    layers: Mapping[str, MoeLayer],
    inside: Mapping[str, tuple[str, Any]],
    result: CheckResult,
) -> set[str]:
    """Check the experts' packed tensors of the checkpoint layout; return their names (none in the kernel layout)."""
    found: set[str] = set()
    for layer in () if artifact.manifest.is_kernel else layers.values():
        prefix = f"{layer.name}."
        of_layer = {
            name for name in inside if name.startswith(prefix) and name[len(prefix) :][:1].isdigit()
        }
        found |= of_layer
        try:
            form = artifact.packed_forms(layer)
        except VerificationError as error:
            result.add_error(error)
            continue
        expected = {
            f"{layer.module(expert, role)}.{name}": (tensor.dtype, tensor.shape)
            for expert in range(layer.num_experts)
            for role in layer.roles
            for name, tensor in form[role].items()
        }
        compare_names(f"layer {layer.name}", "tensor", of_layer, expected, result)
        for name in sorted(of_layer & expected.keys()):
            path, ref = inside[name]
            _compare_tensors(path, {name: ref}, {name: expected[name]}, result)
    return found


# --- static activation scales --------------------------------------------------------------------------------


def is_static(artifact: Artifact, layer: str) -> bool:
    """Return whether a layer's activations have static scales; False for an invalid manifest."""
    try:
        return artifact.layer_spec_of(layer).inputs.is_static
    except HqconvError:  # reported by the check of the manifest
        return False


def check_rank_scales(artifact: Artifact, layers: Iterable[MoeLayer], result: CheckResult) -> None:
    """Check for `files` that the manifest's numbers are valid scales, and that all ranks have them."""
    for layer in layers:
        if not is_static(artifact, layer.name):
            continue
        recorded = _recorded(artifact, layer.name)
        for gemm, found in recorded.items():
            if not _is_scale(found):
                where = f"{names.MANIFEST}: {layer.name}: {gemm}: {names.INPUT_SCALE}"
                result.add(
                    where, _WHAT.format("one a conversion writes"), "a float32 above zero", found
                )
        _compare(artifact, layer.name, recorded, "manifest's", result)


def check_source_scales(
    artifact: Artifact,
    layers: Iterable[MoeLayer],
    source: Source,
    sources: Mapping[str, MoeLayer],
    result: CheckResult,
) -> None:
    """Check for `weights` that manifest and ranks have the scales that follow from the source's."""
    with ThreadPoolExecutor(8, "hqconv-verify") as pool:
        for layer in layers:
            if layer.name not in sources or not is_static(artifact, layer.name):
                continue  # a missing layer is reported by the check of its weights
            try:
                expected = reduce_scales(source, sources[layer.name], pool)
            except NetworkError:
                raise
            except HqconvError as error:
                result.add_error(error, "source: ")
                continue
            for gemm, found in _recorded(artifact, layer.name).items():
                if found != expected.get(gemm):
                    where = f"{names.MANIFEST}: {layer.name}: {gemm}: {names.INPUT_SCALE}"
                    result.add(where, _WHAT.format("source's"), expected.get(gemm, "none"), found)
            _compare(artifact, layer.name, expected, "source's", result)


def _recorded(artifact: Artifact, layer: str) -> dict[str, float | None]:
    """Recorded static scale of each GEMM in the manifest."""
    entries = {gemm: artifact.layers[layer].gemm(gemm) for gemm in names.GEMMS}
    return {gemm: None if entry is None else entry.input_scale for gemm, entry in entries.items()}


def _is_scale(number: Any) -> bool:
    return (
        isinstance(number, float)
        and math.isfinite(number)
        and 0 < number == float(np.float32(number))
    )


def _compare(
    artifact: Artifact,
    layer: str,
    expected: InputScales | Mapping[str, Any],
    whose: str,
    result: CheckResult,
) -> None:
    """Compare every rank's scale of each GEMM with the expected one."""
    for tp_rank, ep_rank in artifact.grid.ranks:
        for gemm in names.GEMMS:
            name = names.input_scale(layer, gemm, artifact.layer_spec_of(layer).inputs)
            where = f"{names.rank_file(layer, tp_rank, ep_rank)}, tensor {name}"
            try:
                found = artifact.read_input_scale(layer, gemm, tp_rank, ep_rank)
            except (HqconvError, OSError) as error:
                result.add(where, "An activation scale cannot be read.", "F32 [1]", str(error))
                continue
            if found != expected.get(gemm):
                result.add(where, _WHAT.format(whose), expected.get(gemm, "none"), found)
