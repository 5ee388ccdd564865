"""The two layouts of a matrix, worked out from its facts alone: what a plan needs, without Humming and without torch.

These are Humming's rules for 16-bit activations on sm90, the only ones that are converted for. A conversion holds
them to what Humming itself says before it writes (`hqconv.pipeline.forms`), and to what its transform gives.

Legend: N output rows and K input columns, in the kernel layout with their padding.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from hqconv.schemas.dtypes import code_of
from hqconv.schemas.target import TargetSchema
from hqconv.schemas.tensors import TensorSpec

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


def splits_e8m0(schema: TargetSchema, param_dtype: str) -> bool:
    """Whether e8m0 scales get a second scale, as they always do with float16, whatever the values are.

    Humming adds the second scale only where some exponent of the rank leaves float16's range. Its presence may
    not depend on values here: sizes come from the plan, and ranks would differ. An unneeded one is 1.0.
    """
    return schema.bs_dtype == "float8e8m0" and param_dtype == "float16"


@functools.cache
def planned_packed_form(
    shape_n: int, shape_k: int, schema: TargetSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorSpec]:
    """The checkpoint layout of one expert's matrix [shape_n, shape_k]: `HummingWeightSchema.get_tensors_attrs`."""
    return _packed(shape_n, shape_k, schema, param_dtype, schema.weight_scale_2_type, has_bias)


def _packed(
    n: int, k: int, schema: TargetSchema, param_dtype: str, scale_2: str, has_bias: bool
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
def planned_kernel_form(
    shape_n: int,
    shape_k: int,
    schema: TargetSchema,
    param_dtype: str,
    sm_version: int,
    has_bias: bool = False,
) -> KernelForm:
    """The kernel form of a GEMM of [shape_n, shape_k]: `prepare_layer_config` and `transform_humming_tensors`."""
    assert sm_version == 90, "the rules here are those of sm90"
    pad_n, pad_k = -shape_n % PAD_N, -shape_k % PAD_K
    n, k = shape_n + pad_n, shape_k + pad_k
    scale_2 = "tensor" if splits_e8m0(schema, param_dtype) else schema.weight_scale_2_type
    packed = _packed(n, k, schema, param_dtype, scale_2, has_bias)
    tensors = {name: _permuted(spec, n, k, schema) for name, spec in packed.items()}
    config = {
        "sm_version": sm_version,
        "shape_n": n,
        "shape_k": k,
        "pad_shape_n": pad_n,
        "pad_shape_k": pad_k,
        "num_experts": 1,
        "b_dtype": schema.b_dtype,
        "a_dtype": param_dtype,
        "c_dtype": param_dtype,
        "bs_dtype": "float32" if schema.weight_scale_type == "block" else schema.bs_dtype or param_dtype,
        "as_dtype": None,
        "input_quant_mode": "none",
        "input_scale_group_size": 0,
        "weight_scale_group_size": schema.weight_scale_group_size,
        "weight_scale_group_size_n": schema.weight_scale_group_size_n,
        "weight_scale_type": schema.weight_scale_type,
        "weight_scale_2_type": scale_2,
        "use_int_weight_scale": False,
        "use_fused_e8m0_scale": False,  # of 8- and 4-bit activations
        "has_zero_point": schema.has_zero_point,
        "is_fp_zero_point": schema.is_fp_zero_point,
        "has_bias": has_bias,
        "use_packed_k_layout": False,
    }
    return KernelForm(tensors, config, dict.fromkeys(LAYOUT_FLAGS, False))


def _permuted(spec: TensorSpec, n: int, k: int, schema: TargetSchema) -> TensorSpec:
    """A packed tensor as the kernel has it: tiles of 16 columns, scales and zero points [K groups, N]."""
    dtype, shape = spec.dtype, spec.shape
    if spec.name == "weight":
        shape = (k // 16, n * schema.num_bits // 2)
    elif shape == (1,):  # one number of each expert
        shape = ()
    elif spec.name == "zero_point" and not schema.is_fp_zero_point:  # unpacked, and packed to 4 or 8 bits
        shape = (shape[1], n * (4 if schema.num_bits <= 4 else 8) // 32)
    elif len(shape) == 2:
        shape = shape[::-1]
    return TensorSpec(spec.name, dtype, shape)
