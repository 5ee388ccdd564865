"""Combinations of weights, activations and GPU that Humming runs, and reasons against the others. No Humming, no torch.

Humming's own rule (`is_humming_schema_compatible`, humming 0.1.19), held to it by tests for every kind; and `_MORE`,
what that rule lets through and something behind it refuses: LayerConfig, the tuners, the kernels' own assertions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hqconv.kernel_layout.layer_config import FP4, FP8, NumberType, fuses_exponents, number, resolve
from hqconv.schemas.input_schema import INPUT_PRESETS
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import PRESETS, WeightSchema, resolve_schema

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
_NO_BFLOAT16 = "sm75 has no bfloat16: use --dtype float16"
_COMMON = ("mxfp4", "nvfp4", "mxfp8", "fp8", "fp8-block", "int8", "int4", "int4-c", "int4-g64", "int4-g64-zp")


def why_not(spec: KernelSpec) -> str | None:
    """Return why Humming does not run a kernel spec on its target, or None."""
    return next((found for rule in (*_RULES, *_MORE) if (found := rule(spec))), None)


def why_incompatible(spec: KernelSpec) -> str | None:
    """Return why Humming's own rule alone refuses a combination, or None."""
    return next((found for rule in _RULES if (found := rule(spec))), None)


def why_overflow(spec: KernelSpec) -> str | None:
    """Return why Humming's kernel computes NaN with such weights on every engine, or None.

    Sums of e5m2 codes (up to 57344) exceed float16 before the scale is applied: docs/kernels.md. So do, by its source,
    products with e5m2 group scales as large, and sums under fp8 group scales that are narrowed to float16 before a
    row's small second scale is applied.
    """
    schema = spec.schema
    has_fp8_scales = schema.bs_dtype in ("float8e4m3", "float8e5m2") and schema.weight_scale_2_type != "none"
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


# --- Humming's rule, in its order -------------------------------------------------------------------------


def _dtypes(spec: KernelSpec) -> str | None:
    bs_dtype = spec.schema.bs_dtype
    if spec.a_dtype == "float8e5m2" and spec.param_dtype != "bfloat16":
        return "float8e5m2 activations need bfloat16 parameters"
    if spec.inputs.a_dtype is None and bs_dtype in ("bfloat16", "float16") and bs_dtype != spec.param_dtype:
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
    assert weight.exponent_bits is not None
    assert operand.exponent_bits is not None
    fits = weight.mantissa_bits <= operand.mantissa_bits and weight.exponent_bits <= operand.exponent_bits
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
    on_hopper = (spec.target.sm_version, spec.a_dtype, size) == (90, "float8e4m3", 128) and as_dtype in (
        None,
        "float32",
    )
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


def _weight(spec: KernelSpec) -> NumberType:
    """The weights' type; floats without exponent bits are integers to integer activations."""
    weight = number(spec.schema.b_dtype)
    is_integer = weight.exponent_bits == 0 and number(spec.a_dtype).is_integer
    return NumberType(weight.num_bits, None, 0) if is_integer else weight


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


def _fits(weight: NumberType, operand: NumberType, spec: KernelSpec) -> bool:
    if weight.exponent_bits is None:
        return weight.num_bits <= operand.mantissa_bits + (1 if spec.schema.has_zero_point else 2)
    assert operand.exponent_bits is not None
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
    if weight.exponent_bits == 0 and number(spec.a_dtype).is_integer:
        return f"{spec.schema.b_dtype} would become integers under {spec.a_dtype} activations: use intN"
    return None


def _second_input_scale(spec: KernelSpec) -> str | None:
    has_two = spec.inputs.input_quant_mode in ("static_tensor_dynamic_group", "dynamic_group_token")
    if has_two and not resolve(spec).use_block_scaled_mma:
        return "activations with two levels of scales need a block-scaled tensor core and such weights"
    if spec.inputs.input_quant_mode == "dynamic_group_token":
        words = (spec.inputs.a_dtype in FP4, spec.inputs.input_scale_group_size, resolve(spec).as_dtype)
        return None if words == (True, 16, "float8e4m3") else "dynamic_group_token is for nvfp4 activations"
    return None


def _input_scale_dtype(spec: KernelSpec) -> str | None:
    """Kernels that multiply scales in themselves read them as float32."""
    if spec.inputs.a_dtype is None or resolve(spec).use_block_scaled_mma:
        return None
    if resolve(spec).as_dtype != "float32":
        return f"activations with {resolve(spec).as_dtype} scales need a block-scaled tensor core and such weights"
    return None


def _block_scaled_groups(spec: KernelSpec) -> str | None:
    schema, inputs, layer = spec.schema, spec.inputs, resolve(spec)
    if not layer.use_block_scaled_mma or not inputs.input_scale_group_size:
        return None
    if schema.weight_scale_type == "group" and (
        inputs.input_scale_group_size != schema.weight_scale_group_size or layer.as_dtype != layer.bs_dtype
    ):
        return "groups and scale types of activations and weights must be the same on a block-scaled tensor core"
    return None


def _e0m3_groups(spec: KernelSpec) -> str | None:
    layer = resolve(spec)
    if spec.target.sm_version // 10 != 10 or not layer.use_block_scaled_mma:
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
    if schema.is_integer and schema.bs_dtype == "float8e4m3" and resolve(spec).use_block_scaled_mma:
        return "a block-scaled tensor core reads e4m3 scales without their sign, and integers have negative ones"
    return None


_MORE: tuple[Rule, ...] = (
    *(_bfloat16_on_turing, _e0m_under_integers, _second_input_scale, _input_scale_dtype),
    *(_block_scaled_groups, _e0m3_groups, _float_zero_points, _int4_from_hopper, _rotated),
    *(_row_scale_of_fused_exponents, _scales_with_a_sign),
)
