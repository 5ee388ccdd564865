"""Kernel layout by Humming: its transform of a rank's slice, and its shapes and LayerConfig for planning.

Everything here is per expert: no layout mixes experts, so a stack of E experts in kernel form is the concatenation of
its experts in kernel form. (Integer scales would, `use_int_weight_scale`; no schema here asks for them.)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.humming_ops.runtime import humming, humming_schema, planning, resident, target_facts
from hqconv.schemas.dtypes import code_of_torch, torch_dtype_of
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema

PAD_N, PAD_K = 256, 128  # vLLM's `pad_n_to_multiple`, `pad_k_to_multiple`
_COMMON = (
    *("mxfp4", "nvfp4", "mxfp8", "fp8", "fp8-block"),
    *("int8", "int4", "int4-c", "int4-g64", "int4-g64-zp"),
)


def humming_inputs(inputs: InputSchema) -> Any:
    """Return the input schema as Humming's own object."""
    return humming().schema.HummingInputSchema(**inputs.humming_fields())


# --- which pairs run -----------------------------------------------------------------------------------------


@functools.cache
def why_not(spec: KernelSpec) -> str | None:
    """Return why a kernel spec does not run on its target, or None: by Humming's rule, its LayerConfig, and ours."""
    if spec.target.sm_version < 80 and spec.param_dtype == "bfloat16":
        return "sm75 has no bfloat16: use --dtype float16"
    if not is_compatible(spec):
        kernel = f"{spec.schema.b_dtype} weights with these scales and {spec.a_dtype} activations"
        return f"it has no kernel for {kernel}, with {spec.param_dtype} parameters"
    try:
        config = _layer_config(PAD_N, 4 * PAD_K, spec, has_bias=False)
    except (AssertionError, ValueError) as error:
        return f"its configuration refuses the pair: {str(error) or 'a failed assertion'}"
    return _why_not_here(spec, config)


def is_compatible(spec: KernelSpec) -> bool:
    """Return whether the target GPU runs the schema with these activations, by Humming's own rule."""
    lib = humming()
    with target_facts(spec.target):
        return bool(
            lib.schema.is_humming_schema_compatible(
                humming_inputs(spec.inputs),
                humming_schema(spec.schema),
                torch_dtype_of(spec.param_dtype),
            )
        )


def fuses_exponents(spec: KernelSpec) -> bool:
    """Return whether the layout moves e8m0 scales into the codes, so that weights are rounded again per rank."""
    return bool(_layer_config(PAD_N, 4 * PAD_K, spec, has_bias=False).use_fused_e8m0_scale)


def _why_not_here(spec: KernelSpec, config: Any) -> str | None:
    """Return why a pair does not run that Humming's rule and LayerConfig let through, or None."""
    schema, is_quantized = spec.schema, spec.inputs.a_dtype is not None
    # Kernels that multiply by scales themselves read them as float32.
    if is_quantized and not config.use_block_scaled_mma and str(config.as_dtype) != "float32":
        return f"activations with {config.as_dtype} scales need a block-scaled tensor core and such weights"
    if schema.is_fp_zero_point and is_quantized:
        return "float zero points are for 16-bit activations (Humming's kernel asserts it)"
    if spec.a_dtype == "int4" and spec.target.sm_version >= 90:
        return "int4 activations run up to sm89: Humming has no tuning for them from sm90 on"
    if schema.rotation and is_quantized:
        return "rotated weights are converted for 16-bit activations only: verify has no reference for the others"
    if config.use_fused_e8m0_scale and schema.has_row_scale and spec.param_dtype == "float16":
        return "the exponents join the scale of each row, which float16 cannot hold then: use --dtype bfloat16"
    # Integers have negative scales, for half of the groups.
    if config.use_block_scaled_mma and schema.is_integer and schema.bs_dtype == "float8e4m3":
        return "a block-scaled tensor core reads e4m3 scales without their sign, and integers have negative ones"
    return None


def nearest(spec: KernelSpec) -> tuple[list[str], list[str]]:
    """Return the names of input schemas that run with the weights on the target, and of schemas with the inputs."""
    inputs = [
        name for name, preset in INPUT_PRESETS.items() if not why_not(replace(spec, inputs=preset))
    ]
    schemas = [name for name in _COMMON if not why_not(replace(spec, schema=resolve_schema(name)))]
    return inputs, schemas


# --- forms ---------------------------------------------------------------------------------------------------

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

    tensors: per expert, by `weight`, `weight_scale` …. config: Humming's LayerConfig of one expert, as a JSON document.
    flags: what a loader must find again.
    """

    tensors: dict[str, TensorSpec]
    config: dict[str, Any]
    flags: dict[str, bool]

    def config_json(self, num_experts: int) -> str:
        """Humming's `LayerConfig` as JSON for a rank with `num_experts` experts."""
        return json.dumps({**self.config, "num_experts": num_experts})


@functools.cache
def kernel_form(shape_n: int, shape_k: int, spec: KernelSpec, has_bias: bool = False) -> KernelForm:
    """The kernel form of a GEMM of [shape_n, shape_k], by Humming's own transform of one expert's zeros."""
    lib = humming()
    config = _layer_config(shape_n, shape_k, spec, has_bias)
    attrs = packed_attributes(
        shape_n, shape_k, spec.schema, spec.param_dtype, has_bias, num_experts=1
    )
    zeros = {name: torch.zeros(a["shape"], dtype=a["dtype"]) for name, a in attrs.items()}
    with planning(), target_facts(spec.target):
        if _is_split(config):
            zeros["weight_scale_2"] = torch.zeros(1)
        tensors = lib.transform.transform_humming_tensors(config, zeros)
        flags = {flag: bool(getattr(config, flag)) for flag in LAYOUT_FLAGS}
    return KernelForm(_of_one_expert(tensors), json.loads(config.to_str()), flags)


@functools.cache
def needs_cuda(spec: KernelSpec) -> bool:
    """Return whether the layout depends on the version of the serving CUDA compiler; False if Humming runs no such."""
    if why_not(spec) is not None:
        return False
    found = set()
    for cuda in ((0, 0), (99, 0)):
        variant = replace(spec, target=replace(spec.target, cuda=cuda))
        with target_facts(variant.target):
            config = _layer_config(PAD_N, 4 * PAD_K, variant, has_bias=False)
            found.add(bool(config.use_native_dequant))
    return len(found) == 2


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
        if _is_split(config):
            config = replace(config, weight_scale_2_type=lib.config.WeightScale2Type.TENSOR)
    return config


def to_kernel(form: KernelForm, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad and permute packed tensors [E, …] of one GEMM into kernel tensors [E, …], as `form` plans them.

    Raises nothing of its own: shapes and pairs are checked by the plan.
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
        transformed: dict[str, torch.Tensor] = lib.transform.transform_humming_tensors(
            config, tensors
        )
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
    return GpuTarget(
        form.config["sm_version"], (99, 0) if form.flags["use_native_dequant"] else (0, 0)
    )


def _is_split(config: Any) -> bool:
    """Return whether e8m0 scales get a second scale for float16, see `compatibility.config_entries`."""
    dtypes = humming().dtypes
    is_e8m0 = config.bs_dtype == dtypes.float8e8m0 and config.c_dtype == dtypes.float16
    is_e8m0 = is_e8m0 and not config.is_channel_weight_scale_2
    return bool(is_e8m0 and not config.use_fused_e8m0_scale and not config.use_block_scaled_mma)


@functools.cache
def packed_form(
    shape_n: int, shape_k: int, schema: WeightSchema, param_dtype: str, has_bias: bool = False
) -> dict[str, TensorSpec]:
    """The checkpoint layout of one expert's matrix: `HummingWeightSchema.get_tensors_attrs`."""
    attrs = packed_attributes(shape_n, shape_k, schema, param_dtype, has_bias, num_experts=None)
    return {
        name: TensorSpec(name, code_of_torch(a["dtype"]), a["shape"]) for name, a in attrs.items()
    }


def packed_attributes(
    shape_n: int,
    shape_k: int,
    schema: WeightSchema,
    param_dtype: str,
    has_bias: bool,
    num_experts: int | None,
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
    return {
        name: TensorSpec(name, code_of_torch(tensor.dtype), tuple(tensor.shape[1:]))
        for name, tensor in tensors.items()
    }
