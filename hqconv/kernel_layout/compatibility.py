"""Facts about Humming's kernels and layer configs, without Humming and without torch: for servers and listings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hqconv.schemas.input_schema import KernelSpec


def why_overflow(spec: KernelSpec) -> str | None:
    """Return why Humming's kernel computes NaN with such weights on every engine, or None.

    Sums of e5m2 codes (up to 57344) exceed float16 before the scale is applied: docs/kernels.md. So do, by its source,
    products with e5m2 group scales as large, and sums under fp8 group scales that are narrowed to float16 before a
    row's small second scale is applied.
    """
    schema = spec.schema
    has_fp8_scales = (
        schema.bs_dtype in ("float8e4m3", "float8e5m2") and schema.weight_scale_2_type != "none"
    )
    is_product = "float8e5m2" in (schema.b_dtype, schema.bs_dtype if has_fp8_scales else None)
    is_narrowed = has_fp8_scales and schema.has_row_scale and spec.param_dtype == "float16"
    if not (is_product and spec.a_dtype == "float16") and not is_narrowed:
        return None
    return f"Humming's kernel overflows on '{spec.schema.name}' with float16 and gives NaN; use --dtype bfloat16."


def config_entries(spec: KernelSpec, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Return the entries of a stored layer config that follow from a kernel spec and its layout flags.

    Sizes are left out. flags: `use_fused_e8m0_scale` and `use_block_scaled_mma` are read.
    """
    schema = spec.schema
    inputs = spec.inputs
    b_dtype = schema.b_dtype
    # of the same width: Humming takes codes with a sign
    if spec.a_dtype == f"int{schema.num_bits}":
        b_dtype = b_dtype.removeprefix("u")
    by_size = "dynamic_group" if inputs.input_scale_group_size else "dynamic_token"
    is_quantized = inputs.a_dtype is not None
    is_block = schema.weight_scale_type == "block"
    return {
        "sm_version": spec.target.sm_version,
        "a_dtype": spec.a_dtype,
        "b_dtype": b_dtype,
        "c_dtype": spec.param_dtype,
        "bs_dtype": "float32" if is_block else schema.bs_dtype or spec.param_dtype,
        "as_dtype": _as_dtype(spec, flags) if is_quantized else None,
        "input_quant_mode": inputs.input_quant_mode or by_size if is_quantized else "none",
        "input_scale_group_size": inputs.input_scale_group_size,
        "weight_scale_group_size": schema.weight_scale_group_size,
        "weight_scale_group_size_n": schema.weight_scale_group_size_n,
        "weight_scale_type": schema.weight_scale_type,
        "weight_scale_2_type": _weight_scale_2_type(spec, flags),
        "use_fused_e8m0_scale": flags.get("use_fused_e8m0_scale", False),
        "has_zero_point": schema.has_zero_point,
        "is_fp_zero_point": schema.is_fp_zero_point,
    }


def _as_dtype(spec: KernelSpec, flags: Mapping[str, bool]) -> str:
    """Return the dtype of the scales of quantized activations."""
    schema = spec.schema
    inputs = spec.inputs
    if inputs.input_scale_dtype is not None:
        return inputs.input_scale_dtype
    if not inputs.input_scale_group_size or not flags.get("use_block_scaled_mma", False):
        return "float32"
    if schema.weight_scale_type == "group":
        return schema.bs_dtype or spec.param_dtype
    return "float8e4m3" if inputs.input_scale_group_size == 16 else "float8e8m0"


def _weight_scale_2_type(spec: KernelSpec, flags: Mapping[str, bool]) -> str:
    """Return the type of the second scales: the schema's, of fused exponents, or of e8m0 scales split for float16.

    Humming splits e8m0 scales only where some exponent of the rank leaves float16's range. Their presence may not
    depend on values here: sizes come from the plan, and ranks would differ. An unneeded second scale is 1.0. Scales per
    row stay the only second scales: the exponents below them are within the range already.
    """
    schema = spec.schema
    is_fused = flags.get("use_fused_e8m0_scale", False)
    if schema.has_row_scale or (is_fused and spec.a_dtype == "int8"):
        return "channel"
    is_widened = schema.bs_dtype == "float8e8m0" and spec.param_dtype == "float16"
    if is_fused or (is_widened and not flags.get("use_block_scaled_mma", False)):
        return "tensor"
    return schema.weight_scale_2_type


def load_layer_config(config: Mapping[str, Any]) -> Any:
    """Return Humming's own LayerConfig of a stored one.

    Imports Humming as installed, without the patches of `humming_ops.runtime`.
    """
    return importlib.import_module("humming.config").LayerConfig(**config)
