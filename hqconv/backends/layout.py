"""The kernel's own layout: what it looks like for a target, and Humming's transform of a rank's slice into it.

Everything here is per expert: no layout of `a16` activations mixes experts, so a stack of E experts in kernel
form is the concatenation of its experts in kernel form.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from hqconv.backends.runtime import humming, resident, target_facts
from hqconv.schemas.dtypes import code_of_torch, torch_dtype_of
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

    tensors: per expert, by `weight`, `weight_scale` …. config: Humming's
    LayerConfig of one expert as words, `layer_config` the same as Humming's own object. flags: what a loader must find
    again.
    """

    tensors: dict[str, TensorSpec]
    config: dict[str, Any]
    flags: dict[str, bool]
    layer_config: Any = field(compare=False, repr=False)

    def config_json(self, num_experts: int) -> str:
        """Humming's `LayerConfig` as JSON for a rank with `num_experts` experts."""
        return json.dumps({**self.config, "num_experts": num_experts})


def humming_schema(schema: TargetSchema) -> Any:
    """The schema as Humming's own object."""
    return humming().schema.HummingWeightSchema(**schema.humming_fields())


def is_compatible(schema: TargetSchema, param_dtype: str, sm_version: int) -> bool:
    """Whether the target GPU runs this schema with 16-bit activations, by Humming's own rule."""
    lib = humming()
    with target_facts(sm_version):
        return bool(
            lib.schema.is_humming_schema_compatible(
                lib.schema.HummingInputSchema(), humming_schema(schema), torch_dtype_of(param_dtype)
            )
        )


@functools.cache
def kernel_form(
    shape_n: int,
    shape_k: int,
    schema: TargetSchema,
    param_dtype: str,
    sm_version: int,
    has_bias: bool = False,
) -> KernelForm:
    """The kernel form of a GEMM of [shape_n, shape_k] on a target, from shapes alone; the GPU here does not matter."""
    lib = humming()
    metas = _meta_tensors(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=1)
    with resident(torch.device("cpu")), target_facts(sm_version):
        config = lib.transform.prepare_layer_config(
            shape_n=shape_n,
            shape_k=shape_k,
            weight_schema=humming_schema(schema),
            num_experts=1,
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            has_bias=has_bias,
            torch_dtype=torch_dtype_of(param_dtype),
            device=-1,
            tensors=metas,
        )
        if _splits_e8m0(schema, param_dtype):
            config = dataclasses.replace(config, weight_scale_2_type=lib.config.WeightScale2Type.TENSOR)
            metas["weight_scale_2"] = metas["weight"].new_empty(1, dtype=torch.float32)
        tensors = lib.transform.transform_humming_tensors(config, metas)
        flags = {flag: bool(getattr(config, flag)) for flag in LAYOUT_FLAGS}
    specs = {name: _spec(name, tensor, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    return KernelForm(specs, json.loads(config.to_str()), flags, config)


def to_kernel(form: KernelForm, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad and permute packed tensors [E, …] of one GEMM into kernel tensors [E, …], as `form` plans them.

    Raises nothing of its own: shapes and pairs are checked by the plan.
    """
    lib, config = humming(), form.layer_config
    num_experts = tensors["weight"].size(0)
    with resident(tensors["weight"].device), target_facts(config.sm_version):
        if num_experts != config.num_experts:
            config = dataclasses.replace(config, num_experts=num_experts)
        if _is_split(config):
            _, tensors = lib.transform.prepare_fp16_e8m0_scale(config, tensors)
            if "weight_scale_2" not in tensors:
                ones = torch.ones(num_experts, device=tensors["weight"].device)
                tensors = {**tensors, "weight_scale_2": ones}
        transformed: dict[str, torch.Tensor] = lib.transform.transform_humming_tensors(config, tensors)
        return transformed


def _splits_e8m0(schema: TargetSchema, param_dtype: str) -> bool:
    """Whether e8m0 scales get a second scale, as they always do with float16, whatever the values are.

    Humming adds the second scale only where some exponent of the rank leaves float16's range. Its presence may
    not depend on values here: sizes come from the plan, and ranks would differ. An unneeded one is 1.0.
    """
    return schema.bs_dtype == "float8e8m0" and param_dtype == "float16"


def _is_split(config: Any) -> bool:
    """`_splits_e8m0` of a LayerConfig."""
    dtypes = humming().dtypes
    return bool(config.bs_dtype == dtypes.float8e8m0 and config.c_dtype == dtypes.float16)


@functools.cache
def packed_form(
    shape_n: int, shape_k: int, schema: TargetSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorSpec]:
    """The checkpoint layout of one expert's matrix: `HummingWeightSchema.get_tensors_attrs`."""
    metas = _meta_tensors(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=None)
    return {name: _spec(name, tensor, tuple(tensor.shape)) for name, tensor in metas.items()}


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
        param_dtype=torch_dtype_of(param_dtype),
        num_experts=num_experts,
        has_bias=has_bias,
    )
    return {name: torch.empty(a["shape"], dtype=a["dtype"], device="meta") for name, a in attrs.items()}


def _spec(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, code_of_torch(tensor.dtype), shape)
