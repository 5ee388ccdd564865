"""Forms of a GEMM, derived from its facts alone: packed and kernel tensors, layer config, flags. No Humming, no torch.

A conversion compares both with Humming's own answers before it writes (`hqconv.conversion.convert`), and with what its
transform gives.

Legend: N output rows and K input columns, in the kernel layout with their padding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

from hqconv.kernel_layout.layer_config import number, resolve
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema

PAD_N, PAD_K = 256, 128  # vLLM's `pad_n_to_multiple`, `pad_k_to_multiple`

LAYOUT_FLAGS = (
    "use_fused_e8m0_scale",
    "use_packed_k_layout",
    "use_native_dequant",
    "use_raw_weight",
    "use_flat_weight",
    "use_ldmatrix_dequant",
    "use_block_scaled_mma",
)


@dataclass(frozen=True)
class KernelForm:
    """One GEMM in kernel form, for a target: all that is known of it before there is a weight.

    tensors: per expert, by `weight`, `weight_scale` …. config: Humming's LayerConfig of one expert as words. flags:
    what a loader must find again.
    """

    tensors: dict[str, TensorSpec]
    config: dict[str, Any]
    flags: dict[str, bool]

    def config_json(self, num_experts: int) -> str:
        """Humming's `LayerConfig` as JSON for a rank with `num_experts` experts."""
        return json.dumps({**self.config, "num_experts": num_experts})


def splits_e8m0(spec: KernelSpec) -> bool:
    """Return whether e8m0 scales get a second scale: always where a kernel widens them to float16.

    Humming adds the second scale only where some exponent of the rank leaves float16's range. Its presence may
    not depend on values here: sizes come from the plan, and ranks would differ. An unneeded one is 1.0. Scales per row
    stay the only second scales: the exponents below them are within the range already.
    """
    layer = resolve(spec)
    is_e8m0 = layer.bs_dtype == "float8e8m0" and spec.param_dtype == "float16" and not spec.schema.has_row_scale
    return is_e8m0 and not layer.use_fused_e8m0_scale and not layer.use_block_scaled_mma


def layout_entries(spec: KernelSpec) -> dict[str, Any]:
    """Entries of the stored layer config, and layout flags, that follow from a kernel spec; sizes aside."""
    fields = dataclasses.asdict(resolve(spec))
    if splits_e8m0(spec):
        fields["weight_scale_2_type"] = "tensor"
    numbers = {"a_dtype": spec.a_dtype, "c_dtype": spec.param_dtype, "sm_version": spec.target.sm_version}
    return {**spec.schema.humming_fields(), **fields, **numbers}


@functools.cache
def planned_packed_form(
    shape_n: int, shape_k: int, schema: WeightSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorSpec]:
    """The checkpoint layout of one expert's matrix [shape_n, shape_k]: `HummingWeightSchema.get_tensors_attrs`."""
    return _packed(shape_n, shape_k, schema, param_dtype, schema.weight_scale_2_type, has_bias)


def _packed(
    n: int, k: int, schema: WeightSchema, param_dtype: str, scale_2: str, has_bias: bool
) -> dict[str, TensorSpec]:
    param, num_bits = code_of(param_dtype), schema.num_bits
    rows, columns = schema.scale_group()
    groups = k // (columns or k)
    scale_shape = (1,) if schema.weight_scale_type == "tensor" else (n // rows, groups)
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight": ("I32", (n, k * num_bits // 32)),
        "weight_scale": (code_of(schema.scale_dtype(param_dtype)), scale_shape),
    }
    if schema.has_zero_point:
        is_float = schema.is_fp_zero_point
        found["zero_point"] = (param, (n, groups)) if is_float else ("I32", (n * num_bits // 32, groups))
    if scale_2 != "none":
        found["weight_scale_2"] = (param, (n,)) if scale_2 == "channel" else ("F32", (1,))
    if has_bias:
        found["bias"] = (param, (n,))
    return {name: TensorSpec(name, *words) for name, words in found.items()}


@functools.cache
def planned_kernel_form(shape_n: int, shape_k: int, spec: KernelSpec, has_bias: bool = False) -> KernelForm:
    """The kernel form of a GEMM of [shape_n, shape_k]: `prepare_layer_config` and `transform_humming_tensors`."""
    pad_n, pad_k = -shape_n % PAD_N, -shape_k % PAD_K
    n, k = shape_n + pad_n, shape_k + pad_k
    schema, layer = spec.schema, resolve(spec)
    scale_2 = "tensor" if splits_e8m0(spec) else layer.weight_scale_2_type
    packed = _packed(n, k, schema, spec.param_dtype, scale_2, has_bias)
    order = ("weight", "weight_scale", "zero_point", "weight_scale_2", "bias")
    tensors = {name: _permuted(packed[name], n, k, spec) for name in order if name in packed}
    config = {
        "sm_version": spec.target.sm_version,
        "shape_n": n,
        "shape_k": k,
        "pad_shape_n": pad_n,
        "pad_shape_k": pad_k,
        "num_experts": 1,
        "b_dtype": layer.b_dtype,
        "a_dtype": spec.a_dtype,
        "c_dtype": spec.param_dtype,
        "bs_dtype": layer.bs_dtype,
        "as_dtype": layer.as_dtype,
        "input_quant_mode": layer.input_quant_mode,
        "input_scale_group_size": spec.inputs.input_scale_group_size,
        "weight_scale_group_size": schema.weight_scale_group_size,
        "weight_scale_group_size_n": schema.weight_scale_group_size_n,
        "weight_scale_type": layer.weight_scale_type,
        "weight_scale_2_type": scale_2,
        "use_int_weight_scale": layer.use_int_weight_scale,
        "use_fused_e8m0_scale": layer.use_fused_e8m0_scale,
        "has_zero_point": schema.has_zero_point,
        "is_fp_zero_point": schema.is_fp_zero_point,
        "has_bias": has_bias,
        "use_packed_k_layout": layer.use_packed_k_layout,
    }
    return KernelForm(tensors, config, {flag: getattr(layer, flag) for flag in LAYOUT_FLAGS})


def _permuted(spec: TensorSpec, n: int, k: int, kernel_spec: KernelSpec) -> TensorSpec:
    """A packed tensor as the kernel has it: weights in its tiles, scales and zero points [K groups, N]."""
    dtype, shape, schema = spec.dtype, spec.shape, kernel_spec.schema
    if spec.name == "weight":
        shape = _weight_shape(n, k, kernel_spec)
    elif shape == (1,):  # one number of each expert
        shape = ()
    elif spec.name == "zero_point" and not schema.is_fp_zero_point:  # unpacked, and packed to 4 or 8 bits
        shape = (shape[1], n * (4 if schema.num_bits <= 4 else 8) // 32)
    elif spec.name == "weight_scale" and len(shape) == 2 and _is_in_scale_tiles(kernel_spec):
        dtype, shape = "I32", _scale_tiles(n, shape[1], kernel_spec)
    elif len(shape) == 2:
        shape = shape[::-1]
    return TensorSpec(spec.name, dtype, shape)


def _weight_shape(n: int, k: int, spec: KernelSpec) -> tuple[int, int]:
    layer, num_bits = resolve(spec), spec.schema.num_bits
    a_bits = number(spec.a_dtype).num_bits
    if layer.use_raw_weight or layer.use_flat_weight:
        return n, k * num_bits // 32
    if layer.use_packed_k_layout:
        return k // 64, n * 64 * num_bits // 32
    return k * a_bits // 256, n * (256 // a_bits) * num_bits // 32


def _is_in_scale_tiles(spec: KernelSpec) -> bool:
    return resolve(spec).use_block_scaled_mma and spec.schema.weight_scale_type == "group"


def _scale_tiles(n: int, groups: int, spec: KernelSpec) -> tuple[int, int]:
    """Group scales as a block-scaled tensor core takes them, four to a word."""
    if spec.target.sm_version // 10 == 10:  # tensor memory: tiles of 128 rows
        return -(-groups // 4), n + -n % 128
    per_instruction = 256 // number(spec.a_dtype).num_bits // spec.schema.weight_scale_group_size
    return (groups // 2, n // 2) if per_instruction == 1 else (groups // 4, n)
