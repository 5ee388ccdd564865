"""The kernel's own layout: Humming's transform of one rank's slice, and the shapes it will have.

Everything here is per expert: no layout of `a16` activations mixes experts, so a stack of E experts in kernel
form is the concatenation of its experts in kernel form.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from hqconv.backends.quantize import humming_schema, torch_dtype
from hqconv.backends.runtime import humming, resident, target_facts
from hqconv.schemas.target import TargetSchema

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
class TensorForm:
    """Shape without the expert dimension, and safetensors dtype, of one kernel tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class KernelForm:
    """What one GEMM's tensors look like in kernel form: per-expert tensors, LayerConfig words, flags."""

    tensors: dict[str, TensorForm]
    config: dict[str, Any]
    flags: dict[str, bool]

    def config_json(self, num_experts: int) -> str:
        """Humming's `LayerConfig` as JSON for a rank with `num_experts` experts."""
        return json.dumps({**self.config, "num_experts": num_experts})


_SAFETENSORS_DTYPES = {
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def safetensors_dtype(dtype: torch.dtype) -> str:
    """The safetensors code of a dtype that Humming's tensors use."""
    return _SAFETENSORS_DTYPES[dtype]


def to_kernel(
    tensors: dict[str, torch.Tensor],
    shape_n: int,
    shape_k: int,
    schema: TargetSchema,
    param_dtype: str,
    sm_version: int,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Pad and permute packed tensors [E, …] of one GEMM: (Humming LayerConfig, kernel tensors [E, …]).

    Raises nothing of its own: shapes and pairs are checked by the plan.
    """
    lib = humming()
    device = tensors["weight"].device
    num_experts = tensors["weight"].size(0)
    with resident(device), target_facts(sm_version):
        config = lib.transform.prepare_layer_config(
            shape_n=shape_n,
            shape_k=shape_k,
            weight_schema=humming_schema(schema),
            num_experts=num_experts,
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            has_bias="bias" in tensors,
            torch_dtype=torch_dtype(param_dtype),
            device=device.index if device.type == "cuda" else -1,
            tensors=tensors,
        )
        config, tensors = _split_e8m0_for_float16(config, tensors, schema, param_dtype)
        return config, lib.transform.transform_humming_tensors(config, tensors)


def _split_e8m0_for_float16(
    config: Any, tensors: dict[str, torch.Tensor], schema: TargetSchema, param_dtype: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Give e8m0 scales with float16 their second scale, whatever the values are.

    Humming adds the second scale only where some exponent of the rank leaves float16's range. Its presence may
    not hang on values here: sizes come from the plan, and ranks would differ. An unneeded one is 1.0.
    """
    if schema.bs_dtype != "float8e8m0" or param_dtype != "float16":
        return config, tensors
    lib = humming()
    scale_2_type = lib.config.WeightScale2Type.TENSOR
    if tensors["weight"].is_meta:
        ones = tensors["weight"].new_empty(tensors["weight"].size(0), dtype=torch.float32)
        return dataclasses.replace(config, weight_scale_2_type=scale_2_type), {
            **tensors,
            "weight_scale_2": ones,
        }
    config, tensors = lib.transform.prepare_fp16_e8m0_scale(config, tensors)
    if "weight_scale_2" not in tensors:
        ones = torch.ones(tensors["weight"].size(0), device=tensors["weight"].device)
        config = dataclasses.replace(config, weight_scale_2_type=scale_2_type)
        tensors = {**tensors, "weight_scale_2": ones}
    return config, tensors


@functools.cache
def kernel_form(
    shape_n: int,
    shape_k: int,
    schema: TargetSchema,
    param_dtype: str,
    sm_version: int,
    has_bias: bool = False,
) -> KernelForm:
    """Kernel tensors' shapes, dtypes and LayerConfig for a GEMM of [shape_n, shape_k], without any data."""
    metas = _meta_tensors(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=1)
    config, tensors = to_kernel(metas, shape_n, shape_k, schema, param_dtype, sm_version)
    with target_facts(sm_version):
        flags = {flag: bool(getattr(config, flag)) for flag in LAYOUT_FLAGS}
    forms = {name: _form(tensor, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    return KernelForm(forms, json.loads(config.to_str()), flags)


@functools.cache
def packed_form(
    shape_n: int, shape_k: int, schema: TargetSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorForm]:
    """The checkpoint layout of one expert's matrix: `HummingWeightSchema.get_tensors_attrs`."""
    metas = _meta_tensors(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=None)
    return {name: _form(tensor, tuple(tensor.shape)) for name, tensor in metas.items()}


def _meta_tensors(
    shape_n: int,
    shape_k: int,
    schema: TargetSchema,
    param_dtype: str,
    has_bias: bool,
    num_experts: int | None,
) -> dict[str, torch.Tensor]:
    attrs = humming_schema(schema).get_tensors_attrs(
        shape_n=shape_n,
        shape_k=shape_k,
        param_dtype=torch_dtype(param_dtype),
        num_experts=num_experts,
        has_bias=has_bias,
    )
    return {name: torch.empty(a["shape"], dtype=a["dtype"], device="meta") for name, a in attrs.items()}


def _form(tensor: torch.Tensor, shape: tuple[int, ...]) -> TensorForm:
    return TensorForm(safetensors_dtype(tensor.dtype), shape, tensor.nbytes)


def is_compatible(schema: TargetSchema, param_dtype: str, sm_version: int) -> bool:
    """Whether the target GPU runs this schema with 16-bit activations, by Humming's own rule."""
    lib = humming()
    with target_facts(sm_version):
        return bool(
            lib.schema.is_humming_schema_compatible(
                lib.schema.HummingInputSchema(), humming_schema(schema), torch_dtype(param_dtype)
            )
        )
