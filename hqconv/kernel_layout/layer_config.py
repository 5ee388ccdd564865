"""Humming's LayerConfig of a kernel spec: derived fields and the layout's flags. No Humming, no torch.

The rules of humming 0.1.19's `config/config.py` and `transform.prepare_layer_config`; tests hold them to Humming for
every kind. No flag depends on a matrix's size: N is padded to a multiple of 256 before the one rule that asks.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hqconv.schemas.kernel_spec import KernelSpec

FP8 = ("float8e4m3", "float8e5m2", "float8e3m4")
FP4 = ("float4e2m1", "float4e0m3")
_MX = "float8e8m0"
_MIXED_WEIGHTS = ("float4e2m1", "float6e3m2", "float6e2m3")  # narrower than fp8, yet the tensor core takes them


@dataclass(frozen=True)
class NumberType:
    """A type of Humming's: exponent is None for integers."""

    num_bits: int
    exponent_bits: int | None
    mantissa_bits: int

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits is None


@functools.cache
def number(name: str) -> NumberType:
    """A type of Humming's by its name. ValueError for no such name."""
    wide = {"bfloat16": NumberType(16, 8, 7), "float16": NumberType(16, 5, 10), "float32": NumberType(32, 8, 23)}
    if name in wide:
        return wide[name]
    match = re.fullmatch(r"u?int([1-8])|float([2-8])e(\d)m(\d)", name)
    if match is None:
        raise ValueError(f"no type of Humming's: {name!r}")
    return NumberType(int(match[1]), None, 0) if match[1] else NumberType(int(match[2]), int(match[3]), int(match[4]))


@dataclass(frozen=True)
class LayerConfigFields:
    """A kernel spec with the fields that Humming derives, by their names in LayerConfig."""

    b_dtype: str
    bs_dtype: str
    as_dtype: str | None
    input_quant_mode: str
    weight_scale_type: str
    weight_scale_2_type: str
    is_umma_supported: bool
    use_fused_e8m0_scale: bool
    use_int_weight_scale: bool
    use_packed_k_layout: bool
    use_native_dequant: bool
    use_raw_weight: bool
    use_flat_weight: bool
    use_ldmatrix_dequant: bool
    use_block_scaled_mma: bool


@functools.cache
def resolve(spec: KernelSpec) -> LayerConfigFields:
    """Derive the fields of a kernel spec, also of one that Humming does not run (`compatibility.why_incompatible`)."""
    schema = spec.schema
    umma, block_scaled = _is_umma(spec), _is_block_scaled(spec)
    ldmatrix = _uses_ldmatrix(spec)
    same_width = number(spec.a_dtype).num_bits == schema.num_bits
    raw = umma and (same_width or (spec.a_dtype in FP8 and schema.b_dtype in _MIXED_WEIGHTS))
    flat = ldmatrix or (same_width and not umma)
    fused = _is_fused(spec, block_scaled)
    integer_scales = _has_integer_scales(spec, fused)
    scale_type, scale_2 = schema.weight_scale_type, _second_scale(spec)
    if fused or integer_scales:
        scale_type, scale_2 = "group", "channel" if scale_2 == "channel" else "tensor"
    bs_dtype = spec.param_dtype if integer_scales else _bs_dtype(spec)
    return LayerConfigFields(
        b_dtype=_b_dtype(spec),
        bs_dtype=bs_dtype,
        as_dtype=_as_dtype(spec, block_scaled),
        input_quant_mode=_quant_mode(spec),
        weight_scale_type=scale_type,
        weight_scale_2_type=scale_2,
        is_umma_supported=umma,
        use_fused_e8m0_scale=fused,
        use_int_weight_scale=integer_scales,
        use_packed_k_layout=_is_packed_k(spec, fused, raw or flat),
        use_native_dequant=not raw and not flat and _has_native_dequant(spec),
        use_raw_weight=raw,
        use_flat_weight=flat,
        use_ldmatrix_dequant=ldmatrix,
        use_block_scaled_mma=block_scaled,
    )


def fuses_exponents(spec: KernelSpec) -> bool:
    """Return whether the layout moves e8m0 scales into the codes, so that weights are rounded again per rank."""
    return resolve(spec).use_fused_e8m0_scale


def activation_entries(spec: KernelSpec) -> dict[str, Any]:
    """Entries of the stored layer config that describe a GEMM's activations."""
    fields = resolve(spec)
    return {
        "a_dtype": spec.a_dtype,
        "as_dtype": fields.as_dtype,
        "input_quant_mode": fields.input_quant_mode,
        "input_scale_group_size": spec.inputs.input_scale_group_size,
    }


def needs_cuda(spec: KernelSpec) -> bool:
    """Return whether the layout depends on the version of the serving CUDA compiler."""
    old, new = (
        resolve(replace(spec, target=replace(spec.target, cuda=cuda))).use_native_dequant for cuda in ((0, 0), (99, 0))
    )
    return old != new


def _b_dtype(spec: KernelSpec) -> str:
    code, a = spec.schema.b_dtype, number(spec.a_dtype)
    if spec.schema.is_integer and a.is_integer and a.num_bits == spec.schema.num_bits:
        return code.removeprefix("u")
    return code


def _bs_dtype(spec: KernelSpec) -> str:
    if spec.schema.weight_scale_type == "block":
        return "float32"
    return spec.schema.bs_dtype or spec.param_dtype


def _quant_mode(spec: KernelSpec) -> str:
    inputs = spec.inputs
    if inputs.a_dtype is None:
        return "none"
    return inputs.input_quant_mode or ("dynamic_group" if inputs.input_scale_group_size else "dynamic_token")


def _as_dtype(spec: KernelSpec, block_scaled: bool) -> str | None:
    inputs = spec.inputs
    if inputs.a_dtype is None:
        return None
    if inputs.input_scale_dtype is not None:
        return inputs.input_scale_dtype
    if not block_scaled or not inputs.input_scale_group_size:
        return "float32"
    if spec.schema.weight_scale_type == "group":
        return _bs_dtype(spec)
    return "float8e4m3" if inputs.input_scale_group_size == 16 else _MX


def _second_scale(spec: KernelSpec) -> str:
    """int8 activations over mxfp4 have a second scale per row, whatever the schema says."""
    schema = spec.schema
    is_mx = (schema.b_dtype, schema.bs_dtype, schema.weight_scale_type) == ("float4e2m1", _MX, "group")
    return "channel" if spec.inputs.a_dtype == "int8" and is_mx else schema.weight_scale_2_type


def _is_umma(spec: KernelSpec) -> bool:
    """Tensor memory instructions of SM 10x, and what of them."""
    if spec.target.sm_version // 10 != 10:
        return False
    schema, inputs = spec.schema, spec.inputs
    is_block = schema.weight_scale_type == "block"
    in_epilogue = not inputs.input_scale_group_size and schema.weight_scale_type in ("channel", "tensor")
    if inputs.a_dtype is None:
        return True
    if inputs.a_dtype in FP8:
        mx_inputs = inputs.input_scale_group_size in (0, 32) and (
            not inputs.input_scale_group_size or inputs.input_scale_dtype in (None, _MX)
        )
        mx_weights = schema.weight_scale_group_size == 0 or (
            (schema.weight_scale_group_size, _bs_dtype(spec)) == (32, _MX)
        )
        return in_epilogue or (mx_inputs and mx_weights and not is_block)
    if inputs.a_dtype in FP4:
        return (schema.is_integer or schema.b_dtype in FP4) and _has_fp4_scales(spec) and not is_block
    return inputs.a_dtype == "int8" and schema.is_integer and in_epilogue and spec.target.sm_version == 100


def _has_fp4_scales(spec: KernelSpec) -> bool:
    schema, inputs = spec.schema, spec.inputs
    grouped_inputs, grouped = inputs.input_scale_group_size > 0, schema.weight_scale_type == "group"
    size = inputs.input_scale_group_size or schema.weight_scale_group_size
    bs_dtype = _bs_dtype(spec)
    scale = (inputs.input_scale_dtype or bs_dtype) if grouped_inputs else bs_dtype
    known = size == 0 or (size, scale) in ((32, _MX), (16, _MX), (16, "float8e4m3"))
    matching = not (grouped_inputs and grouped) or (
        inputs.input_scale_group_size == schema.weight_scale_group_size and inputs.input_scale_dtype in (None, bs_dtype)
    )
    return known and matching


def _is_block_scaled(spec: KernelSpec) -> bool:
    """Return whether the tensor core applies the group scales."""
    if _is_mxmma(spec):
        return True
    a = number(spec.a_dtype)
    has_groups = spec.inputs.input_scale_group_size > 0 or spec.schema.weight_scale_group_size > 0
    return _is_umma(spec) and not a.is_integer and a.num_bits <= 8 and (a.num_bits == 4 or has_groups)


def _is_mxmma(spec: KernelSpec) -> bool:
    """Block-scaled instructions of SM 12x."""
    schema, inputs = spec.schema, spec.inputs
    if spec.target.sm_version // 10 != 12 or schema.weight_scale_type == "block":
        return False
    size, group = inputs.input_scale_group_size, schema.weight_scale_group_size
    if _quant_mode(spec) == "dynamic_group_token" and (inputs.a_dtype not in FP4 or size != 16):
        return False
    is_group = schema.weight_scale_type == "group"
    if is_group and size > 0 and size != group:
        return False
    if inputs.a_dtype in FP8:
        return size in (0, 32) and (not is_group or (group, _bs_dtype(spec)) == (32, _MX))
    if inputs.a_dtype in FP4:
        if inputs.a_dtype == "float4e0m3" and group == 32:
            return False
        known = ((16, _MX), (16, "float8e4m3"), (32, _MX))
        return size in (0, 16, 32) and (not is_group or (group, _bs_dtype(spec)) in known)
    return False


def _uses_ldmatrix(spec: KernelSpec) -> bool:
    """Small integers under wider ones, widened while they are loaded; with Humming's patched kernels, its default."""
    pairs = (("int8", 4), ("int4", 2))
    is_pair = spec.schema.is_integer and (spec.inputs.a_dtype, spec.schema.num_bits) in pairs
    return is_pair and not spec.schema.has_zero_point


def _is_fused(spec: KernelSpec, block_scaled: bool) -> bool:
    """mxfp4 weights whose exponents go into fp8's or int8's codes."""
    schema = spec.schema
    if block_scaled and spec.a_dtype == "float8e4m3":
        return False
    is_mx = (schema.b_dtype, schema.bs_dtype) == ("float4e2m1", _MX)
    return spec.a_dtype in ("float8e4m3", "int8") and is_mx and schema.weight_scale_group_size > 0


def _has_integer_scales(spec: KernelSpec, fused: bool) -> bool:
    schema = spec.schema
    return (
        not fused
        and spec.a_dtype in ("int8", "int4")
        and _second_scale(spec) != "channel"
        and spec.inputs.input_scale_group_size == 0
        and schema.weight_scale_group_size > 0
        and schema.weight_scale_group_size_n == 1
    )


def _is_packed_k(spec: KernelSpec, fused: bool, is_raw_or_flat: bool) -> bool:
    size = spec.inputs.input_scale_group_size
    if spec.target.sm_version // 10 != 9 or is_raw_or_flat or number(spec.a_dtype).num_bits != 8:
        return False
    if spec.schema.num_bits % 2 or 0 < size < 128:
        return False
    return size >= 128 if fused else spec.schema.weight_scale_group_size == 128


def _has_native_dequant(spec: KernelSpec) -> bool:
    """Return whether the GPU and its compiler have an instruction that converts this type."""
    sm_version, cuda = spec.target.sm_version, spec.target.cuda or (0, 0)
    if sm_version // 10 == 9:
        return False
    fp8, small = ("float8e4m3", "float8e5m2"), _MIXED_WEIGHTS
    code, low_bit = spec.schema.b_dtype, sm_version >= 100
    if spec.a_dtype == "float16":
        return (code in fp8 and sm_version >= 89 and cuda >= (11, 8)) or (code in small and low_bit and cuda >= (12, 7))
    return spec.a_dtype == "bfloat16" and low_bit and cuda >= (13, 2) and code in (*fp8, *small)


def load_layer_config(config: Mapping[str, Any]) -> Any:
    """Humming's own LayerConfig of a stored one. Imports Humming as installed, without the patches of `runtime`."""
    return importlib.import_module("humming.config").LayerConfig(**config)
