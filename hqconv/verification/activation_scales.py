"""Static activation scales: those of rank files against the manifest, the manifest's against the source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hqconv.artifact.reader import Artifact
from hqconv.conversion.collect_input_scales import reduce_scales
from hqconv.errors import HqconvError, NetworkError
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.verification.result import CheckResult


def is_static(artifact: Artifact, layer: str) -> bool:
    """Return whether a layer's activations have static scales; False for an invalid manifest."""
    try:
        return artifact.layer_spec_of(layer).inputs.is_static
    except HqconvError:  # a finding of the `files` check
        return False


def check_rank_scales(artifact: Artifact, result: CheckResult) -> None:
    """Check that the manifest's scales are valid numbers, and that all rank files have them."""
    for layer in artifact.layers:
        if not is_static(artifact, layer):
            continue
        recorded = _recorded(artifact, layer)
        for gemm, scale in recorded.items():
            if not _is_scale(scale):
                where = f"{names.MANIFEST}: {layer}: {gemm}: {names.INPUT_SCALE}"
                what = "A static activation scale is not one that a conversion writes."
                result.add(where, what, "a float32 above zero", scale)
        _compare(artifact, layer, recorded, "manifest", result)


def check_source_scales(
    artifact: Artifact, layer: str, source: Source, original: MoeLayer, result: CheckResult
) -> None:
    """Check that the manifest has the scales that follow from the source's layer `original`."""
    with ThreadPoolExecutor(8, "hqconv-verify") as pool:
        try:
            expected = reduce_scales(source, original, pool)
        except NetworkError:
            raise
        except HqconvError as error:
            result.add_error(error, "source: ")
            return
    for gemm, scale in _recorded(artifact, layer).items():
        if scale != expected.get(gemm):
            where = f"{names.MANIFEST}: {layer}: {gemm}: {names.INPUT_SCALE}"
            what = "A static activation scale is not the source's."
            result.add(where, what, expected.get(gemm, "none"), scale)
    _compare(artifact, layer, expected, "source", result)


def _recorded(artifact: Artifact, layer: str) -> dict[str, float | None]:
    entries = {gemm: artifact.layers[layer].gemm(gemm) for gemm in names.GEMMS}
    return {gemm: None if entry is None else entry.input_scale for gemm, entry in entries.items()}


def _is_scale(number: Any) -> bool:
    if not isinstance(number, float) or not math.isfinite(number):
        return False
    return 0 < number == float(np.float32(number))


def _compare(
    artifact: Artifact, layer: str, expected: Mapping[str, Any], owner: str, result: CheckResult
) -> None:
    """Compare every rank's scale of each GEMM with the expected one."""
    for tp_rank, ep_rank in artifact.grid.ranks:
        for gemm in names.GEMMS:
            name = names.input_scale(layer, gemm, artifact.layer_spec_of(layer).inputs)
            where = f"{names.rank_file(layer, tp_rank, ep_rank)}, tensor {name}"
            try:
                found = artifact.read_input_scale(layer, gemm, tp_rank, ep_rank)
            except (HqconvError, OSError) as error:
                what = "An activation scale cannot be read."
                result.add(where, what, "F32 [1]", str(error))
                continue
            if found != expected.get(gemm):
                what = f"A static activation scale is not the {owner}'s."
                result.add(where, what, expected.get(gemm, "none"), found)
