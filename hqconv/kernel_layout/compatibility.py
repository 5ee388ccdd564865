"""Combinations of weights, activations and GPU that Humming runs, and reasons against the others. No Humming, no torch.

Humming's own rule (`is_humming_schema_compatible`, humming 0.1.19), held to it by tests for every kind; and `_MORE`,
what that rule lets through and something behind it refuses: LayerConfig, the tuners, the kernels' own assertions.
`inspect` and `schemas` need no more: forms of tensors are Humming's own (`kernel_layout.transform`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hqconv.schemas.dtypes import CodeKind, CodeType, parse_code_type
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec
from hqconv.schemas.weight_schema import PRESETS, WeightSchema, resolve_schema

FP8 = ("float8e4m3", "float8e5m2", "float8e3m4")
FP4 = ("float4e2m1", "float4e0m3")
_LEAST_SM = {
    "float16": 75,
    "bfloat16": 80,
    "int8": 75,
    "int4": 75,
    "float8e4m3": 89,
    "float8e5m2": 89,
    "float8e3m4": 100,
    "float4e2m1": 100,
    "float4e0m3": 100,
}
_UNDOCUMENTED = ("float8e3m4", "float4e0m3")  # encodings that NVIDIA does not document
_UNDOCUMENTED_SM = (100, 103, 120, 121)
_MX = "float8e8m0"
_FP4_GROUPS = ((32, _MX), (16, _MX), (16, "float8e4m3"))
_NO_BFLOAT16 = "sm75 has no bfloat16: use --dtype float16"
_COMMON = (
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "fp8",
    "fp8-block",
    "int8",
    "int4",
    "int4-c",
    "int4-g64",
    "int4-g64-zp",
)


_WIDE = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}  # exponent and mantissa


@functools.cache
def number(name: str) -> CodeType:
    """A type of Humming's by its name. ValueError for no such name."""
    if name not in _WIDE:
        return parse_code_type(name)
    return CodeType(CodeKind.FLOAT, 1 + sum(_WIDE[name]), *_WIDE[name])


def why_not(spec: KernelSpec) -> str | None:
    """Return why Humming does not run a kernel spec on its target, or None."""
    return next((found for rule in (*_RULES, *_MORE) if (found := rule(spec))), None)


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


def nearest(spec: KernelSpec) -> tuple[list[str], list[str]]:
    """Names of input schemas that run with the weights on the target, and of weight schemas with the inputs."""
    inputs = [name for name, one in INPUT_PRESETS.items() if not why_not(replace(spec, inputs=one))]
    schemas = {name: PRESETS.get(name) or resolve_schema(name) for name in _COMMON}
    return inputs, [name for name, one in schemas.items() if not why_not(replace(spec, schema=one))]


PAD_N, PAD_K = 256, 128  # vLLM's `pad_n_to_multiple`, `pad_k_to_multiple`

# --- fields that Humming derives -----------------------------------------------------------------------------


def fuses_exponents(spec: KernelSpec) -> bool:
    """Return whether the layout moves e8m0 scales into the codes, so that weights are rounded again per rank."""
    schema = spec.schema
    is_mx = (schema.b_dtype, schema.bs_dtype) == (
        "float4e2m1",
        _MX,
    ) and schema.weight_scale_group_size > 0
    return is_mx and (
        spec.a_dtype == "int8" or (spec.a_dtype == "float8e4m3" and not is_block_scaled(spec))
    )


def splits_e8m0(spec: KernelSpec) -> bool:
    """Return whether e8m0 scales get a second scale: always where a kernel widens them to float16.

    Humming adds the second scale only where some exponent of the rank leaves float16's range. Its presence may
    not depend on values here: sizes come from the plan, and ranks would differ. An unneeded one is 1.0. Scales per row
    stay the only second scales: the exponents below them are within the range already.
    """
    is_e8m0 = spec.schema.scale_dtype(spec.param_dtype) == _MX and spec.param_dtype == "float16"
    return (
        is_e8m0
        and not spec.schema.has_row_scale
        and not fuses_exponents(spec)
        and not is_block_scaled(spec)
    )


def config_entries(spec: KernelSpec) -> dict[str, Any]:
    """Entries of a stored layer config that follow from a kernel spec; sizes and the order of codes are left out."""
    schema, inputs, a = spec.schema, spec.inputs, number(spec.a_dtype)
    is_fused, is_quantized = fuses_exponents(spec), inputs.a_dtype is not None
    has_row_scale = schema.has_row_scale or (is_fused and spec.a_dtype == "int8")
    is_signed = schema.is_integer and a.is_integer and a.num_bits == schema.num_bits
    by_size = "dynamic_group" if inputs.input_scale_group_size else "dynamic_token"
    scale_2 = (
        "channel"
        if has_row_scale
        else "tensor"
        if is_fused or splits_e8m0(spec)
        else schema.weight_scale_2_type
    )
    return {
        "sm_version": spec.target.sm_version,
        "a_dtype": spec.a_dtype,
        "b_dtype": schema.b_dtype.removeprefix("u") if is_signed else schema.b_dtype,
        "c_dtype": spec.param_dtype,
        "bs_dtype": "float32" if schema.weight_scale_type == "block" else _bs_dtype(spec),
        "as_dtype": _as_dtype(spec) if is_quantized else None,
        "input_quant_mode": inputs.input_quant_mode or by_size if is_quantized else "none",
        "input_scale_group_size": inputs.input_scale_group_size,
        "weight_scale_group_size": schema.weight_scale_group_size,
        "weight_scale_group_size_n": schema.weight_scale_group_size_n,
        "weight_scale_type": schema.weight_scale_type,
        "weight_scale_2_type": scale_2,
        "use_fused_e8m0_scale": is_fused,
        "has_zero_point": schema.has_zero_point,
        "is_fp_zero_point": schema.is_fp_zero_point,
    }


def load_layer_config(config: Mapping[str, Any]) -> Any:
    """Humming's own LayerConfig of a stored one. Imports Humming as installed, without the patches of `runtime`."""
    return importlib.import_module("humming.config").LayerConfig(**config)


@functools.cache
def is_block_scaled(spec: KernelSpec) -> bool:
    """Return whether the tensor core applies the group scales: in tensor memory on SM 10x, block by block on SM 12x."""
    if spec.inputs.a_dtype not in (*FP8, *FP4) or spec.schema.weight_scale_type == "block":
        return False
    on_family = {10: _is_in_tensor_memory, 12: _is_by_blocks}.get(spec.target.sm_version // 10)
    return on_family is not None and on_family(spec)


def _is_in_tensor_memory(spec: KernelSpec) -> bool:
    schema, inputs = spec.schema, spec.inputs
    size, group = inputs.input_scale_group_size, schema.weight_scale_group_size
    if spec.a_dtype in FP8:
        mx_inputs = size == 0 or (size == 32 and inputs.input_scale_dtype in (None, _MX))
        mx_weights = group == 0 or (group, _bs_dtype(spec)) == (32, _MX)
        return mx_inputs and mx_weights and (size > 0 or group > 0)
    bs_dtype = _bs_dtype(spec)
    scale = inputs.input_scale_dtype or bs_dtype if size else bs_dtype
    is_known = not (size or group) or (size or group, scale) in _FP4_GROUPS
    is_one_kind = (
        not size or schema.weight_scale_type != "group" or (size == group and scale == bs_dtype)
    )
    return (schema.is_integer or schema.b_dtype in FP4) and is_known and is_one_kind


def _is_by_blocks(spec: KernelSpec) -> bool:
    schema, inputs = spec.schema, spec.inputs
    size, group = inputs.input_scale_group_size, schema.weight_scale_group_size
    is_group = schema.weight_scale_type == "group"
    if inputs.input_quant_mode == "dynamic_group_token" and (spec.a_dtype not in FP4 or size != 16):
        return False
    if is_group and size > 0 and size != group:
        return False
    if spec.a_dtype in FP8:
        return size in (0, 32) and (not is_group or (group, _bs_dtype(spec)) == (32, _MX))
    if spec.a_dtype == "float4e0m3" and group == 32:
        return False
    return size in (0, 16, 32) and (not is_group or (group, _bs_dtype(spec)) in _FP4_GROUPS)


def _bs_dtype(spec: KernelSpec) -> str:
    return spec.schema.bs_dtype or spec.param_dtype


def _as_dtype(spec: KernelSpec) -> str:
    """Return the type of the scales of narrow activations."""
    size, schema = spec.inputs.input_scale_group_size, spec.schema
    if spec.inputs.input_scale_dtype is not None:
        return spec.inputs.input_scale_dtype
    if not size or not is_block_scaled(spec):
        return "float32"
    if schema.weight_scale_type == "group":
        return _bs_dtype(spec)
    return "float8e4m3" if size == 16 else _MX


# --- Humming's rule, in its order -------------------------------------------------------------------------


def _dtypes(spec: KernelSpec) -> str | None:
    bs_dtype = spec.schema.bs_dtype
    if spec.a_dtype == "float8e5m2" and spec.param_dtype != "bfloat16":
        return "float8e5m2 activations need bfloat16 parameters"
    if (
        spec.inputs.a_dtype is None
        and bs_dtype in ("bfloat16", "float16")
        and bs_dtype != spec.param_dtype
    ):
        return f"scales in {bs_dtype} need {bs_dtype} parameters"
    return None


def _least_sm(spec: KernelSpec) -> str | None:
    least = _LEAST_SM[spec.a_dtype]
    if spec.target.sm_version >= least:
        return None
    if spec.a_dtype == "bfloat16":
        return _NO_BFLOAT16
    return f"{spec.a_dtype} activations begin with sm{least}"


def _undocumented(spec: KernelSpec) -> str | None:
    operand = _operand(spec)
    same_width = number(operand).num_bits == number(spec.a_dtype).num_bits
    used = spec.a_dtype in _UNDOCUMENTED or (operand in _UNDOCUMENTED and same_width)
    if used and spec.target.sm_version not in _UNDOCUMENTED_SM:
        return f"{operand if operand in _UNDOCUMENTED else spec.a_dtype} runs on sm100, sm103, sm120 and sm121 only"
    return None


def _width(spec: KernelSpec) -> str | None:
    if _weight(spec).num_bits > min(8, number(spec.a_dtype).num_bits):
        return f"{spec.schema.b_dtype} weights are wider than {spec.a_dtype} activations"
    return None


def _values(spec: KernelSpec) -> str | None:
    """Refuse weights with codes whose values the tensor core's operand type lacks."""
    weight, has_zero, code = _weight(spec), spec.schema.has_zero_point, spec.schema.b_dtype
    if spec.a_dtype in ("int8", "int4"):
        widest = number(spec.a_dtype).num_bits
        if not weight.is_integer and not (spec.a_dtype == "int8" and _is_mxfp4(spec.schema)):
            return f"{spec.a_dtype} activations run with integer weights" + (
                " and mxfp4" if spec.a_dtype == "int8" else ""
            )
        if weight.num_bits == widest and has_zero:
            return f"{widest}-bit weights have no zero point under {spec.a_dtype} activations"
        return None
    operand = number(_operand(spec))
    lost = f"{code} does not fit {spec.a_dtype} activations' products"
    if weight.is_integer:
        room = operand.mantissa_bits + (1 if has_zero else 2)
        return lost if weight.num_bits >= operand.num_bits or weight.num_bits > room else None
    if weight.exponent_bits == 0:
        is_lost = code != _operand(spec) and weight.mantissa_bits > operand.mantissa_bits + 1
        return lost if is_lost else None
    fits = (
        weight.mantissa_bits <= operand.mantissa_bits
        and weight.exponent_bits <= operand.exponent_bits
    )
    return None if fits else lost


def _sm10x(spec: KernelSpec) -> str | None:
    if spec.target.sm_version // 10 != 10:
        return None
    schema, inputs = spec.schema, spec.inputs
    used = (spec.a_dtype, _operand(spec))
    if "float8e3m4" in used:
        mx_inputs = not inputs.input_scale_group_size or (
            inputs.input_scale_group_size == 32 and inputs.input_scale_dtype in (None, _MX)
        )
        mx_weights = not schema.weight_scale_group_size or (
            (schema.weight_scale_group_size, schema.bs_dtype) == (32, _MX)
        )
        if not (mx_inputs and mx_weights) or schema.weight_scale_type == "block":
            return f"on {spec.target.name} {schema.b_dtype} runs with scales per channel or e8m0 per 32 only"
    size = inputs.input_scale_group_size or schema.weight_scale_group_size or 16
    if "float4e0m3" in used and size != 16:
        return f"on {spec.target.name} float4e0m3 has groups of 16"
    return None


def _unequal_groups(spec: KernelSpec) -> str | None:
    size, group = spec.inputs.input_scale_group_size, spec.schema.weight_scale_group_size
    if not size or not group or size == group:
        return None
    reason = f"activations in groups of {size} do not run with weights in groups of {group}"
    if not _is_mxfp4(spec.schema) or spec.target.sm_version >= 120:
        return reason
    as_dtype = spec.inputs.input_scale_dtype
    on_hopper = (spec.target.sm_version, spec.a_dtype, size) == (
        90,
        "float8e4m3",
        128,
    ) and as_dtype in (None, "float32")
    if number(spec.a_dtype).num_bits == 8 and as_dtype != spec.schema.bs_dtype and not on_hopper:
        return f"{reason} on {spec.target.name}"
    return None


def _small_groups(spec: KernelSpec) -> str | None:
    size, group = spec.inputs.input_scale_group_size, spec.schema.weight_scale_group_size
    least = {8: 32, 16: 16}.get(number(spec.a_dtype).num_bits, 64 if spec.a_dtype == "int4" else 16)
    if 0 < group < 16 or 0 < group < least:
        return f"{spec.a_dtype} activations run with weights in groups of {least} or more"
    if spec.inputs.a_dtype is not None and 0 < size < least and least > 16:
        return f"{spec.a_dtype} activations have groups of {least} or more"
    return None


def _fp4_scales(spec: KernelSpec) -> str | None:
    schema, inputs = spec.schema, spec.inputs
    if spec.a_dtype not in FP4 or not schema.weight_scale_group_size or schema.b_dtype not in FP4:
        return None
    bs_dtype = schema.bs_dtype or spec.param_dtype
    as_dtype = inputs.input_scale_dtype or bs_dtype
    known = (_MX, "float8e4m3")
    if bs_dtype not in known:
        return f"4-bit activations need weights with scales in {_MX} or float8e4m3"
    if inputs.input_scale_group_size and as_dtype != bs_dtype:
        return f"scales of activations ({as_dtype}) and weights ({bs_dtype}) must be of one type"
    return None


def _is_mxfp4(schema: WeightSchema) -> bool:
    words = (schema.b_dtype, schema.bs_dtype, schema.weight_scale_group_size)
    return words == ("float4e2m1", _MX, 32)


def _weight(spec: KernelSpec) -> CodeType:
    """The weights' type; floats without exponent bits are integers to integer activations."""
    weight = number(spec.schema.b_dtype)
    is_integer = weight.kind == CodeKind.SIGN_MAGNITUDE and number(spec.a_dtype).is_integer
    return CodeType(CodeKind.SYM_INT, weight.num_bits) if is_integer else weight


def _operand(spec: KernelSpec) -> str:
    """Operand type of the tensor core (Humming's `get_mma_b_dtype`)."""
    weight, code = _weight(spec), spec.schema.b_dtype
    is_float = not weight.is_integer
    if is_float and any(spec.a_dtype in kinds and code in kinds for kinds in (FP8, FP4)):
        return code
    if spec.a_dtype not in FP8 or weight.num_bits >= 8:
        return spec.a_dtype
    candidates = [spec.a_dtype, "float8e4m3"]
    if spec.target.sm_version in _UNDOCUMENTED_SM:
        candidates.append("float8e3m4")
    return next((name for name in candidates if _fits(weight, number(name), spec)), spec.a_dtype)


def _fits(weight: CodeType, operand: CodeType, spec: KernelSpec) -> bool:
    if weight.is_integer:
        return weight.num_bits <= operand.mantissa_bits + (1 if spec.schema.has_zero_point else 2)
    mantissa = weight.mantissa_bits - (weight.exponent_bits == 0)
    return mantissa <= operand.mantissa_bits and weight.exponent_bits <= operand.exponent_bits


Rule = Callable[[KernelSpec], str | None]
_RULES: tuple[Rule, ...] = (
    *(_dtypes, _least_sm, _undocumented, _width, _values, _sm10x),
    *(_unequal_groups, _small_groups, _fp4_scales),
)

# --- what Humming refuses later ----------------------------------------------------------------------------


def _bfloat16_on_turing(spec: KernelSpec) -> str | None:
    is_turing = spec.target.sm_version < 80 and spec.param_dtype == "bfloat16"
    return _NO_BFLOAT16 if is_turing else None


def _e0m_under_integers(spec: KernelSpec) -> str | None:
    weight = number(spec.schema.b_dtype)
    if weight.kind == CodeKind.SIGN_MAGNITUDE and number(spec.a_dtype).is_integer:
        return f"{spec.schema.b_dtype} would become integers under {spec.a_dtype} activations: use intN"
    return None


def _second_input_scale(spec: KernelSpec) -> str | None:
    has_two = spec.inputs.input_quant_mode in ("static_tensor_dynamic_group", "dynamic_group_token")
    if has_two and not is_block_scaled(spec):
        return (
            "activations with two levels of scales need a block-scaled tensor core and such weights"
        )
    if spec.inputs.input_quant_mode == "dynamic_group_token":
        is_nvfp4 = spec.inputs.a_dtype in FP4 and spec.inputs.input_scale_group_size == 16
        is_nvfp4 = is_nvfp4 and _as_dtype(spec) == "float8e4m3"
        return None if is_nvfp4 else "dynamic_group_token is for nvfp4 activations"
    return None


def _input_scale_dtype(spec: KernelSpec) -> str | None:
    """Kernels that multiply scales in themselves read them as float32."""
    if spec.inputs.a_dtype is None or is_block_scaled(spec) or _as_dtype(spec) == "float32":
        return None
    return f"activations with {_as_dtype(spec)} scales need a block-scaled tensor core and such weights"


def _block_scaled_groups(spec: KernelSpec) -> str | None:
    schema, size = spec.schema, spec.inputs.input_scale_group_size
    if not size or schema.weight_scale_type != "group" or not is_block_scaled(spec):
        return None
    if size != schema.weight_scale_group_size or _as_dtype(spec) != _bs_dtype(spec):
        return "groups and scale types of activations and weights must be the same on a block-scaled tensor core"
    return None


def _e0m3_groups(spec: KernelSpec) -> str | None:
    if spec.target.sm_version // 10 != 10 or not is_block_scaled(spec):
        return None
    size = spec.inputs.input_scale_group_size or spec.schema.weight_scale_group_size or 16
    if "float4e0m3" in (spec.a_dtype, spec.schema.b_dtype) and size != 16:
        return f"on {spec.target.name} float4e0m3 has groups of 16"
    return None


def _float_zero_points(spec: KernelSpec) -> str | None:
    if spec.schema.is_fp_zero_point and number(spec.a_dtype).num_bits < 16:
        return "float zero points are for 16-bit activations (Humming's kernel asserts it)"
    return None


def _int4_from_hopper(spec: KernelSpec) -> str | None:
    if spec.a_dtype == "int4" and spec.target.sm_version >= 90:
        return "int4 activations run up to sm89: Humming has no tuning for them from sm90 on"
    return None


def _rotated(spec: KernelSpec) -> str | None:
    if spec.schema.rotation and spec.inputs.a_dtype is not None:
        return "rotated weights are converted for 16-bit activations only: verify has no judge for the others"
    return None


def _row_scale_of_fused_exponents(spec: KernelSpec) -> str | None:
    if spec.schema.has_row_scale and spec.param_dtype == "float16" and fuses_exponents(spec):
        return "the exponents join the scale of each row, which float16 cannot hold then: use --dtype bfloat16"
    return None


def _scales_with_a_sign(spec: KernelSpec) -> str | None:
    """Refuse integers under e4m3 scales, negative for half of the groups, where the tensor core takes unsigned ones."""
    schema = spec.schema
    if schema.is_integer and schema.bs_dtype == "float8e4m3" and is_block_scaled(spec):
        return "a block-scaled tensor core reads e4m3 scales without their sign, and integers have negative ones"
    return None


_MORE: tuple[Rule, ...] = (
    *(_bfloat16_on_turing, _e0m_under_integers, _second_input_scale, _input_scale_dtype),
    *(_block_scaled_groups, _e0m3_groups, _float_zero_points, _int4_from_hopper, _rotated),
    *(_row_scale_of_fused_exponents, _scales_with_a_sign),
)
