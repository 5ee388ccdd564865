"""Checks of the source's calibrated activation scales against the request, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hqconv.errors import InputError, RequestError
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.tensors import TensorRef

# Two levels of scales: above those of groups, which e4m3 holds, a static one, the largest input / (6 * 448).
_TWO_LEVELS, _OF_TWO_LEVELS = "static_tensor_dynamic_group", "float4e2m1"
_DYNAMIC = "Use an input schema whose scales are found while serving, such as fp8 or int8."


def static_layers(experts: ExpertMap, spec: ConversionSpec) -> list[MoeLayer]:
    """Return the layers whose activation scales are carried into the artifact."""
    return [layer for layer in experts.layers if spec.kernel_spec_of(layer.name).inputs.is_static]


def check_input_scales(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse static scales that cannot be carried, or that the source lacks.

    Raises RequestError, or InputError for a tensor that holds something else than scales.
    """
    for kernel_spec in spec.kernel_specs:
        if kernel_spec.inputs.is_static:
            _check_kernel_spec(kernel_spec, spec)
    for layer in static_layers(experts, spec):
        _check_source(layer, spec.kernel_spec_of(layer.name))
        for gemm, refs in layer.input_scales.refs.items():
            for ref in refs:
                _check_tensor(ref, layer.input_scales.max_values[gemm])


def _check_kernel_spec(kernel_spec: KernelSpec, spec: ConversionSpec) -> None:
    where = f"input schema {kernel_spec.inputs.name}"
    if spec.layout == artifact_names.CHECKPOINT:
        what = f"From the checkpoint layout {ENGINE.name} cannot load static activation scales of experts."
        raise RequestError(what, where=where, remedy=f"Use --layout kernel. {_DYNAMIC}")
    if kernel_spec.schema.rotation:
        raise RequestError(
            "Static activation scales were measured before activations are rotated: they would be wrong.",
            where=f"{where}, schema {kernel_spec.schema.name}: hadamard_block_size",
            expected=0,
            found=kernel_spec.schema.rotation,
            remedy=_DYNAMIC,
        )


def _check_source(layer: MoeLayer, kernel_spec: KernelSpec) -> None:
    scales = layer.input_scales
    lacking = next((gemm for gemm in artifact_names.GEMMS if not scales.refs.get(gemm)), None)
    if lacking is not None:
        raise RequestError(
            "The source has no static activation scales.",
            where=f"{layer.name}: {lacking}, input schema {kernel_spec.inputs.name}",
            expected=f"tensors such as {next(iter(scales.missing.get(lacking, ())), f'{layer.name}.….input_scale')}",
            found="none of them",
            remedy=_DYNAMIC,
        )
    is_two = kernel_spec.inputs.input_quant_mode == _TWO_LEVELS
    if scales.a_dtype != kernel_spec.inputs.a_dtype or is_two != (scales.a_dtype == _OF_TWO_LEVELS):
        raise RequestError(
            "The source's static activation scales were not measured for these activations.",
            where=f"{layer.name}, input schema {kernel_spec.inputs.name}",
            expected=f"{kernel_spec.inputs.a_dtype} activations with a static scale per tensor"
            f"{', and dynamic ones per group' * is_two}, by the config",
            found=scales.a_dtype or "none that the config declares",
            remedy=_DYNAMIC,
        )


def _check_tensor(ref: TensorRef, max_values: int) -> None:
    count = math.prod(ref.shape)
    if ref.dtype not in FLOATS or not 1 <= count <= max_values:
        raise InputError(
            "A tensor is no activation scale.",
            where=f"tensor {ref.name}",
            expected=f"{' or '.join(FLOATS)}, {'one number' if max_values == 1 else f'1 to {max_values} numbers'}",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy="Check that the checkpoint is complete and that config.json belongs to it.",
        )


def missing_warnings(layers: Iterable[MoeLayer]) -> list[str]:
    """Warn of experts that calibration missed: the largest scale of the other experts serves these too."""
    chosen = list(layers)
    of_all = [name for layer in chosen for names in layer.input_scales.missing.values() for name in names]
    if not of_all:
        return []
    return [
        f"{len(of_all)} projections of experts have no input_scale, {of_all[0]} the first: calibration missed them. "
        "The largest of each layer's others is used for all."
    ]
