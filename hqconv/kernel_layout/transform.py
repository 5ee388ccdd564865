"""Kernel layout by Humming: slices of ranks, their transform, its shapes for planning, and its fingerprint.

Everything here is per expert: no layout mixes experts, so a stack of E experts in kernel form is the concatenation of
its experts in kernel form. (Integer scales would, `use_int_weight_scale`; no schema here asks for them.)

The fingerprint is the digest of the kernel tensors that the installed Humming makes of a small matrix. Two versions of
Humming with the same fingerprint lay weights out alike, so that an artifact of one runs with the other. The matrix is
the same for every caller, and no two of its words, scales or zero points within a repetition are equal.
Legend: E experts, N output rows, K input columns, I intermediate size. w1 and w3 are cut along N, w2 along K; `w13` is
`[w1; w3]`, gate first, never interleaved (w3 alone where the family has no gate).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.humming_ops.runtime import (
    has_twins,
    humming,
    humming_schema,
    planning,
    resident,
    target_facts,
)
from hqconv.quantization.bit_codec import bits_of, join
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import TpSlice
from hqconv.schemas.input_schema import A16, INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.tensors import TensorSpec, code_of_torch, torch_dtype_of
from hqconv.schemas.weight_schema import LayerSchema, WeightSchema, resolve_schema

# vLLM's `pad_n_to_multiple`, `pad_k_to_multiple`
PAD_N = 256
PAD_K = 128
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
    schema = spec.schema
    is_quantized = spec.inputs.a_dtype is not None
    # Kernels that multiply by scales themselves read them as float32.
    if is_quantized and not config.use_block_scaled_mma and str(config.as_dtype) != "float32":
        return f"activations with {config.as_dtype} scales need a block-scaled tensor core and such weights"
    if schema.is_fp_zero_point and is_quantized:
        return "float zero points are for 16-bit activations (Humming's kernel asserts it)"
    if spec.a_dtype == "int4" and spec.target.sm_version >= 90:
        return "int4 activations run up to sm89: Humming has no tuning for them from sm90 on"
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


def prepare_linear(
    packed: Mapping[str, torch.Tensor], schema: WeightSchema, param_dtype: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return Humming's LayerConfig and kernel tensors of a linear layer [N, K], as vLLM prepares it when it starts."""
    lib = humming()
    weight = packed["weight"]
    found: tuple[Any, dict[str, torch.Tensor]]
    found = lib.transform.prepare_and_transform_humming_tensors(
        tensors=dict(packed),
        shape_n=weight.size(0),
        shape_k=weight.size(1) * 32 // schema.num_bits,
        weight_schema=humming_schema(schema),
        input_schema=humming_inputs(A16),
        pad_n_to_multiple=PAD_N,
        pad_k_to_multiple=PAD_K,
        torch_dtype=torch_dtype_of(param_dtype),
        device=weight.device if weight.is_cuda else -1,
    )
    return found


def packed_values(
    shape_n: int,
    shape_k: int,
    schema: WeightSchema,
    param_dtype: str,
    num_experts: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return packed tensors of a size, with some values. num_experts: None for a linear layer."""
    attributes = packed_attributes(shape_n, shape_k, schema, param_dtype, False, num_experts)
    return {name: values(one["shape"], one["dtype"]) for name, one in attributes.items()}


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
    lib = humming()
    num_experts = tensors["weight"].size(0)
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


_SHAPE = (PAD_N, 4 * PAD_K)  # of the matrix: whole tiles of every kernel and groups of every schema
_ODD = 0x9E3779B1  # multiples of an odd number visit every word of 32 bits
_WORD = 1 << 32
# Number of a value's first pattern, and of its distinct patterns, by the type of a scale: all finite and positive.
_PATTERNS = {
    torch.float8_e8m0fnu: (120, 14),  # 2^-7 to 2^6: Humming's fused exponents keep a range of 16
    torch.float8_e4m3fn: (8, 112),
    torch.float8_e5m2: (8, 112),
    torch.float16: (0x3000, 0x1800),
    torch.bfloat16: (0x3E00, 0x0300),
    torch.float32: (0x3F000000, 0x01000000),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def layout_fingerprint(spec: KernelSpec, device: str | None = None) -> str:
    """Return 64 hexadecimal digits: the SHA-256 of the kernel tensors of the small matrix, with their names and shapes.

    device: None is the CPU, or the GPU where the CPU cannot stand in for this Humming's kernels. Takes milliseconds on
    a CPU. Raises RequestError where neither can lay out.
    """
    device = device or ("cpu" if has_twins() or not torch.cuda.is_available() else "cuda")
    tensors = packed_values(*_SHAPE, spec.schema, spec.param_dtype, num_experts=1)
    packed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return digest(to_kernel(kernel_form(*_SHAPE, spec), packed))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the matrix: words that differ, or the patterns of a float's type in turn."""
    numbers = torch.arange(math.prod(shape), dtype=torch.int64)
    if dtype == torch.int32:
        bits = (numbers * _ODD) % _WORD
        return torch.where(bits >= _WORD // 2, bits - _WORD, bits).to(torch.int32).reshape(shape)
    first, count = _PATTERNS[dtype]
    return (first + numbers % count).to(_INTEGERS[dtype.itemsize]).view(dtype).reshape(shape)


Tensors = dict[str, torch.Tensor]


def gemm_tensors(
    projections: Mapping[str, Tensors], schema: LayerSchema, part: TpSlice
) -> dict[str, Tensors]:
    """Cut packed tensors [E, …] of w13 and w2 for one TP rank.

    `projections` maps w1 (optional), w3 and w2 to full-size packed tensors as `QuantizedStack.tensors`, plus `bias`
    where the family has one; `part` is the rank's part of I. The w2 bias is on TP rank 0 and zero elsewhere, since
    ranks are summed.
    """
    tp_rank, begin, end, share = part
    roles = [role for role in ("w1", "w3") if role in projections]
    upper = [_cut_rows(projections[role], begin, end) for role in roles]
    down = _cut_columns(projections["w2"], schema.of("w2"), begin, end)
    if end - begin < share:
        upper = [_pad(tensors, schema.of("w13"), 1, end - begin, share) for tensors in upper]
        down = _pad(down, schema.of("w2"), 2, end - begin, share)
    if "bias" in down and tp_rank > 0:
        down["bias"] = torch.zeros_like(down["bias"])
    return {
        "w13": _join_rows(upper),
        "w2": {name: tensor.contiguous() for name, tensor in down.items()},
    }


def _cut_rows(tensors: Tensors, begin: int, end: int) -> Tensors:
    num_rows = tensors["weight"].size(1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:  # a tensor-level scale
            return tensor
        # Rows of packed zero points and of scale blocks stand for several rows of the matrix each.
        length = tensor.size(1)
        return tensor[:, begin * length // num_rows : end * length // num_rows]

    return {name: cut(tensor) for name, tensor in tensors.items()}


def _cut_columns(tensors: Tensors, schema: WeightSchema, begin: int, end: int) -> Tensors:
    num_columns = tensors["weight"].size(2) * 32 // schema.num_bits

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_per_row = name != "weight" and schema.weight_scale_group_size == 0
        # A bias, a tensor-level or a channel-level scale or zero point.
        if tensor.ndim < 3 or is_per_row:
            return tensor
        length = tensor.size(2)
        return tensor[:, :, begin * length // num_columns : end * length // num_columns]

    return {name: cut(name, tensor) for name, tensor in tensors.items()}


def _pad(tensors: Tensors, schema: WeightSchema, axis: int, size: int, share: int) -> Tensors:
    """Fill the last rank's slice up to its share: with rows that give 0, and columns that only meet such rows.

    Zero bits do, but for e8m0 scales: their zero bits are a power of two so small that float16's range would have
    to be split for it, so those are repeated. The zero codes below them are 0 whatever the scale.
    """

    def pad(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_per_row = axis == 2 and name != "weight" and schema.weight_scale_group_size == 0
        if is_per_row or tensor.ndim <= axis:
            return tensor
        num_filled = tensor.size(axis)
        length = num_filled * share // size
        bits = bits_of(tensor)
        padded = bits.new_zeros((*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))
        padded.narrow(axis, 0, num_filled).copy_(bits)
        if tensor.dtype == torch.float8_e8m0fnu:
            rest = padded.narrow(axis, num_filled, length - num_filled)
            rest.copy_(bits.narrow(axis, num_filled - 1, 1).expand_as(rest))
        return padded.view(tensor.dtype)

    return {name: pad(name, tensor) for name, tensor in tensors.items()}


def _join_rows(upper: list[Tensors]) -> Tensors:
    """Join gate's rows and then up's. Tensor-level scales are gate's: the quantizer gave both the same."""
    return {
        name: tensor if tensor.ndim == 1 else join([tensors[name] for tensors in upper], 1)
        for name, tensor in upper[0].items()
    }
