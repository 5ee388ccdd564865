"""Checks of static activation scales: rank files against the manifest, and the manifest against the source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hqconv.artifact.reader import Artifact
from hqconv.conversion.collect_input_scales import InputScales, reduce_scales
from hqconv.errors import HqconvError, NetworkError
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.verification.result import CheckResult

_WHAT = "A static activation scale is not the {}."


def is_static(artifact: Artifact, layer: str) -> bool:
    """Return whether a layer's activations have static scales; False for an invalid manifest."""
    try:
        return artifact.kernel_spec_of(layer).inputs.is_static
    except HqconvError:  # reported by the check of the manifest
        return False


def static_names(artifact: Artifact, layer: str) -> list[str]:
    """Return the tensors of each rank's file with the static scales of a layer, if it has any."""
    if not is_static(artifact, layer):
        return []
    inputs = artifact.kernel_spec_of(layer).inputs
    return [names.input_scale(layer, gemm, inputs) for gemm in names.GEMMS]


def check_rank_scales(artifact: Artifact, layers: Iterable[MoeLayer], result: CheckResult) -> None:
    """Check for `files` that the manifest's numbers are valid scales, and that all ranks have them."""
    for layer in layers:
        if not is_static(artifact, layer.name):
            continue
        recorded = _recorded(artifact, layer.name)
        for gemm, found in recorded.items():
            if not _is_scale(found):
                where = f"{names.MANIFEST}: {layer.name}: {gemm}: {names.INPUT_SCALE}"
                result.add(where, _WHAT.format("one a conversion writes"), "a float32 above zero", found)
        _compare(artifact, layer.name, recorded, "manifest's", result)


def check_source_scales(
    artifact: Artifact, layers: Iterable[MoeLayer], source: Source, sources: Mapping[str, MoeLayer], result: CheckResult
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
                result.add(f"source: {error.where}", error.what, error.expected, error.found)
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
    return isinstance(number, float) and math.isfinite(number) and 0 < number == float(np.float32(number))


def _compare(
    artifact: Artifact, layer: str, expected: InputScales | Mapping[str, Any], whose: str, result: CheckResult
) -> None:
    """Compare every rank's scale of each GEMM with the expected one."""
    for tp_rank, ep_rank in artifact.grid.ranks:
        for gemm, name in zip(names.GEMMS, static_names(artifact, layer), strict=True):
            where = f"{names.rank_file(layer, tp_rank, ep_rank)}, tensor {name}"
            try:
                found = artifact.read_input_scale(layer, gemm, tp_rank, ep_rank)
            except (HqconvError, OSError) as error:
                result.add(where, "An activation scale cannot be read.", "F32 [1]", str(error))
                continue
            if found != expected.get(gemm):
                result.add(where, _WHAT.format(whose), expected.get(gemm, "none"), found)
