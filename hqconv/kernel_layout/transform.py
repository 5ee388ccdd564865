"""Kernel layout by Humming: its transform of a rank's slice, and its shapes and LayerConfig for planning.

Everything here is per expert: no layout mixes experts, so a stack of E experts in kernel form is the concatenation of
its experts in kernel form. (Integer scales would, `use_int_weight_scale`; no schema here asks for them.)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from hqconv.kernel_layout.gemm_forms import LAYOUT_FLAGS, PAD_K, PAD_N, KernelForm, splits_e8m0
from hqconv.kernel_layout.runtime import humming, resident, target_facts
from hqconv.schemas.dtypes import code_of_torch, torch_dtype_of
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import InputSchema
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema


def humming_schema(schema: WeightSchema) -> Any:
    """The schema as Humming's own object."""
    return humming().schema.HummingWeightSchema(**schema.humming_fields())


def humming_inputs(inputs: InputSchema) -> Any:
    """The input schema as Humming's own object."""
    return humming().schema.HummingInputSchema(**inputs.humming_fields())


def is_compatible(spec: KernelSpec) -> bool:
    """Return whether the target GPU runs the schema with these activations, by Humming's own rule."""
    lib = humming()
    with target_facts(spec.target):
        return bool(
            lib.schema.is_humming_schema_compatible(
                humming_inputs(spec.inputs), humming_schema(spec.schema), torch_dtype_of(spec.param_dtype)
            )
        )


@functools.cache
def kernel_form(shape_n: int, shape_k: int, spec: KernelSpec, has_bias: bool = False) -> KernelForm:
    """The kernel form of a GEMM of [shape_n, shape_k], by Humming's own transform of `meta` tensors."""
    lib = humming()
    config = _layer_config(shape_n, shape_k, spec, has_bias)
    attrs = _attributes(shape_n, shape_k, spec.schema, spec.param_dtype, has_bias, num_experts=1)
    metas = {name: torch.empty(a["shape"], dtype=a["dtype"], device="meta") for name, a in attrs.items()}
    with resident(torch.device("cpu")), target_facts(spec.target):
        if splits_e8m0(spec):
            metas["weight_scale_2"] = metas["weight"].new_empty(1, dtype=torch.float32)
        tensors = lib.transform.transform_humming_tensors(config, metas)
    return KernelForm(_of_one_expert(tensors), *_words(config, spec.target))


def is_as_planned(form: KernelForm, shape_n: int, shape_k: int, spec: KernelSpec, has_bias: bool = False) -> bool:
    """Return whether Humming gives a planned form's LayerConfig; `to_kernel` checks the tensors."""
    config = _layer_config(shape_n, shape_k, spec, has_bias)
    return _words(config, spec.target) == (form.config, form.flags)


def _layer_config(shape_n: int, shape_k: int, spec: KernelSpec, has_bias: bool) -> Any:
    """Humming's LayerConfig of a GEMM of one expert; the GPU here does not matter."""
    lib = humming()
    with target_facts(spec.target):
        config = lib.transform.prepare_layer_config(
            shape_n=shape_n,
            shape_k=shape_k,
            weight_schema=humming_schema(spec.schema),
            input_schema=humming_inputs(spec.inputs),
            num_experts=1,
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            has_bias=has_bias,
            torch_dtype=torch_dtype_of(spec.param_dtype),
            device=-1,
        )
        if splits_e8m0(spec):
            config = dataclasses.replace(config, weight_scale_2_type=lib.config.WeightScale2Type.TENSOR)
    return config


def _words(config: Any, target: GpuTarget) -> tuple[dict[str, Any], dict[str, bool]]:
    """JSON document of a LayerConfig, and its flags."""
    with target_facts(target):
        return json.loads(config.to_str()), {flag: bool(getattr(config, flag)) for flag in LAYOUT_FLAGS}


def to_kernel(form: KernelForm, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad and permute packed tensors [E, …] of one GEMM into kernel tensors [E, …], as `form` plans them.

    Raises nothing of its own: shapes and pairs are checked by the plan. A `meta` weight gives a `meta` weight, unless
    exponents are fused into its codes.
    """
    lib, num_experts = humming(), tensors["weight"].size(0)
    with resident(tensors["weight"].device), target_facts(_target_of(form)):
        config = layer_config(form.config_json(num_experts))
        if config.use_fused_e8m0_scale:  # whose transform works in place
            tensors = {**tensors, "weight": tensors["weight"].clone()}
        if _is_split(config):
            _, tensors = lib.transform.prepare_fp16_e8m0_scale(config, tensors)
            if "weight_scale_2" not in tensors:
                ones = torch.ones(num_experts, device=tensors["weight_scale"].device)
                tensors = {**tensors, "weight_scale_2": ones}
        transformed: dict[str, torch.Tensor] = lib.transform.transform_humming_tensors(config, tensors)
    found = _of_one_expert(transformed)
    assert found == form.tensors, f"planned {form.tensors}, Humming gives {found}"
    return transformed


@functools.cache
def layer_config(text: str) -> Any:
    """Humming's own LayerConfig, from `KernelForm.config_json`."""
    document = json.loads(text)
    with target_facts(GpuTarget(document["sm_version"])):
        return humming().config.LayerConfig(**document)


def _target_of(form: KernelForm) -> GpuTarget:
    """A target for which Humming lays out as `form` says: of the compiler only what it decides matters."""
    return GpuTarget(form.config["sm_version"], (99, 0) if form.flags["use_native_dequant"] else (0, 0))


def _is_split(config: Any) -> bool:
    """`splits_e8m0` of a LayerConfig."""
    dtypes = humming().dtypes
    is_e8m0 = config.bs_dtype == dtypes.float8e8m0 and config.c_dtype == dtypes.float16
    is_e8m0 = is_e8m0 and not config.is_channel_weight_scale_2
    return bool(is_e8m0 and not config.use_fused_e8m0_scale and not config.use_block_scaled_mma)


@functools.cache
def packed_form(
    shape_n: int, shape_k: int, schema: WeightSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorSpec]:
    """The checkpoint layout of one expert's matrix: `HummingWeightSchema.get_tensors_attrs`."""
    attrs = _attributes(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=None)
    return {name: TensorSpec(name, code_of_torch(a["dtype"]), a["shape"]) for name, a in attrs.items()}


def _attributes(
    shape_n: int, shape_k: int, schema: WeightSchema, param_dtype: str, has_bias: bool, num_experts: int | None
) -> dict[str, dict[str, Any]]:
    """Humming's `shape` and torch `dtype` of a matrix's packed tensors."""
    attrs: dict[str, dict[str, Any]] = humming_schema(schema).get_tensors_attrs(
        shape_n=shape_n,
        shape_k=shape_k,
        param_dtype=torch_dtype_of(param_dtype),
        num_experts=num_experts,
        has_bias=has_bias,
    )
    return attrs


def _of_one_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Kernel tensors [E, …] without E."""
    return {name: TensorSpec(name, code_of_torch(one.dtype), tuple(one.shape[1:])) for name, one in tensors.items()}
