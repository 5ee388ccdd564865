"""Round-to-nearest quantization of expert matrices, with one result on every device.

Legend: N output rows, K input columns, G groups along K.

Schemas without a tensor- or second-level scale are Humming's `HummingWeightSchema.quant_tensor`, one matrix at
a time. With a shared scale (`fp8-tensor`, `nvfp4`) the recipe is the contract's: order-free maxima, the group
scale rounded first, and codes chosen against what is stored. The error of every matrix is measured against
its *stored* codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hqconv.backends import loops, twins
from hqconv.backends.runtime import humming, resident
from hqconv.backends.twins import Array
from hqconv.schemas.target import TargetSchema

_FP8_MAX = {"float8e4m3": 448.0, "float8e5m2": 57344.0}
_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8e4m3": torch.float8_e4m3fn,
    "float8e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Cost:
    """What a matrix lost by its encoding.

    `error`, `power`: float64 sums of (w - decoded)**2 and of w**2, in one folding order on every device.
    `num_exact`: of `num_groups` scale groups (per row), those without any error, where they were counted. `is_direct`:
    the source's codes and scales were kept, and nothing was measured.
    """

    error: float = 0.0
    power: float = 0.0
    num_exact: int = 0
    num_groups: int = 0
    is_direct: bool = False


@dataclass(frozen=True)
class Quantized:
    """One matrix in Humming's packed form, and what that cost.

    `tensors`: `weight` int32 [N, K * bits / 32], `weight_scale`, `zero_point`, `weight_scale_2` as
    `HummingWeightSchema.get_tensors_attrs` describes them without an expert dimension.
    """

    tensors: dict[str, torch.Tensor]
    cost: Cost
    is_finite: bool = True


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a Humming dtype name that has one."""
    return _TORCH_DTYPES[name]


def humming_schema(schema: TargetSchema) -> Any:
    """The schema as Humming's own object."""
    return humming().schema.HummingWeightSchema(**schema.humming_fields())


def quantize(
    matrices: Sequence[torch.Tensor],
    schema: TargetSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
) -> list[Quantized]:
    """Quantize matrices [N, K] of one expert that share their tensor-level scale, if the schema has one.

    Inputs are bfloat16, float16 or float32 on one device; each is quantized alone and at full size.
    A matrix with NaN or Inf comes back with `is_finite` False and meaningless codes. `powers`, float32 [N, G] powers
    of two, are the group scales to take instead of the recipe's, where a tensor-level second scale lets them.
    """
    stored = None if powers is None else _powers_of_two(matrices, powers, schema)
    if matrices[0].is_cuda:
        with resident(matrices[0].device):
            return _quantize_cuda(matrices, schema, param_dtype, stored, count_exact)
    return _quantize_cpu(matrices, schema, param_dtype, stored, count_exact)


@dataclass
class _Scales:
    """Group scales that are given: stored fp8 [N, G], and the second scale float32 [1, 1]."""

    group: torch.Tensor
    second: torch.Tensor


def _powers_of_two(
    matrices: Sequence[torch.Tensor], powers: Sequence[torch.Tensor], schema: TargetSchema
) -> list[_Scales]:
    """Split powers of two into fp8 scales and one power of two above them, the same for all the matrices.

    The largest scale of a group that is not zero becomes fp8's largest power of two; so scales down to 2**-17 of it
    are exact, and smaller ones become that.
    """
    fp8 = torch_dtype(schema.bs_dtype or "")
    top = 2.0 ** math.floor(math.log2(_FP8_MAX[schema.bs_dtype or ""]))
    lowest = torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps
    largest = torch.stack(
        [
            torch.where(m.view(*p.shape, -1).abs().amax(-1) > 0, p, torch.zeros_like(p)).amax()
            for m, p in zip(matrices, powers, strict=True)
        ]
    ).amax()
    second = (largest / top).clamp_min(2.0**-100).reshape(1, 1)  # its inverse stays finite
    return [_Scales((p / second).clamp(lowest, top).to(fp8), second) for p in powers]


# --- CPU: compiled loops -----------------------------------------------------------------------------------


@dataclass
class _Ranges:
    """Highest and lowest value per group, float32 [N, G] (one row of blocks per block of rows)."""

    source: Array
    highest: Array
    lowest: Array
    is_finite: bool
    fused: bool  # see `twins.FUSED_GROUP_SIZE`


def _quantize_cpu(
    matrices: Sequence[torch.Tensor],
    schema: TargetSchema,
    param_dtype: str,
    given: Sequence[_Scales] | None,
    count_exact: bool,
) -> list[Quantized]:
    ranges = [_measure(matrix, schema) for matrix in matrices]
    shared = None
    if schema.is_coupled:
        shared = np.max([np.maximum(r.highest, -r.lowest).max() for r in ranges]).astype(np.float32)
    each: Sequence[_Scales | None] = given or [None] * len(ranges)
    return [
        _encode_cpu(r, schema, param_dtype, shared, g, count_exact) for r, g in zip(ranges, each, strict=True)
    ]


def _measure(matrix: torch.Tensor, schema: TargetSchema) -> _Ranges:
    source = twins.as_bits(matrix)
    num_rows, num_columns = source.shape
    group = schema.weight_scale_group_size or num_columns
    bounds = np.empty((2, num_rows, num_columns // group), np.uint32)
    is_finite = loops.group_ranges(source, group, bounds[0], bounds[1])
    highest, lowest = bounds.view(np.float32)
    if schema.weight_scale_type == "block":
        blocks = (num_rows // schema.weight_scale_group_size_n, schema.weight_scale_group_size_n, -1)
        highest, lowest = highest.reshape(blocks).max(axis=1), lowest.reshape(blocks).min(axis=1)
    elif schema.weight_scale_type == "tensor":
        highest, lowest = highest.max(keepdims=True), lowest.min(keepdims=True)
    fused = matrix.dtype == torch.float32 and group <= twins.FUSED_GROUP_SIZE
    return _Ranges(source, highest, lowest, bool(is_finite), fused)


def _encode_cpu(
    ranges: _Ranges,
    schema: TargetSchema,
    param_dtype: str,
    shared: Any,
    given: _Scales | None,
    count_exact: bool,
) -> Quantized:
    kind, bits, exponent, mantissa = twins.parse_dtype(schema.b_dtype)
    kind = loops.ASYM_INT if schema.has_zero_point else kind
    num_rows, num_columns = ranges.source.shape
    highest, lowest = ranges.highest, ranges.lowest
    if schema.weight_scale_type == "tensor":
        highest, lowest = np.full_like(highest, shared), np.full_like(lowest, -shared)
    with np.errstate(all="ignore"):
        scale, lowest, zero = twins.group_scales(
            (kind, bits, exponent, mantissa),
            highest,
            lowest,
            e8m0=schema.bs_dtype == "float8e8m0",
            negative=schema.bs_dtype != "float8e5m3",
            fp_zero=schema.is_fp_zero_point,
            fused=ranges.fused,
        )
        tensors, decode_scale, scale_2, limit = _store_scales(
            torch.from_numpy(scale), schema, param_dtype, shared, given
        )
        inverse = np.float32(1) / scale
        if scale_2 is not None:
            effective = decode_scale * scale_2
            inverse = np.where(effective > 0, np.float32(1) / effective, np.float32(0))
    if schema.has_zero_point:
        tensors["zero_point"], zero = _store_zero_point(zero, schema, param_dtype)

    def per_row(values: Array) -> Array:
        block_rows = num_rows // values.shape[0]
        return np.ascontiguousarray(np.repeat(values, block_rows, axis=0) if block_rows > 1 else values)

    packed = np.empty((num_rows, num_columns * bits // 8), np.uint8)
    sums, exact = np.empty((2, num_rows)), np.zeros(num_rows if count_exact else 0, np.int64)
    scale_2_rows = (
        np.ones(num_rows, np.float32) if scale_2 is None else np.broadcast_to(scale_2, (num_rows, 1))
    )
    loops.encode_matrix(
        ranges.source,
        (kind, bits, exponent, mantissa),
        np.float32(limit),
        per_row(inverse),
        per_row(lowest),
        per_row(decode_scale),
        per_row(zero),
        np.ascontiguousarray(scale_2_rows).reshape(-1),
        packed,
        *sums,
        exact,
    )
    tensors["weight"] = torch.from_numpy(packed.view(np.int32))
    cost = Cost(
        float(loops.fold_sum(sums[0])),
        float(loops.fold_sum(sums[1])),
        int(exact.sum()),
        _num_groups(ranges.source.shape, schema) if count_exact else 0,
    )
    return Quantized(tensors, cost, ranges.is_finite)


def _num_groups(shape: Sequence[int], schema: TargetSchema) -> int:
    return shape[0] * (shape[1] // (schema.weight_scale_group_size or shape[1]))


def _store_scales(
    scale: torch.Tensor, schema: TargetSchema, param_dtype: str, shared: Any, given: _Scales | None
) -> tuple[dict[str, torch.Tensor], Array, Array | None, float]:
    """Stored scale tensors, the float32 scales they decode to, scale_2 as [1, 1] or [N, 1], and the clamp."""
    if schema.weight_scale_type == "tensor":
        return {"weight_scale": scale.reshape(1)}, scale.numpy(), None, 0.0
    if schema.weight_scale_2_type != "none":
        amax = torch.full((1, 1), float(shared)) if schema.weight_scale_2_type == "tensor" else None
        stored, scale_2_tensor, scale_2, limit = _two_level(scale, schema, param_dtype, amax, given)
        tensors = {"weight_scale": stored, "weight_scale_2": scale_2_tensor}
        return tensors, stored.float().numpy(), scale_2.numpy(), limit
    if schema.bs_dtype == "float8e8m0":
        stored = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight_scale": stored}, scale.numpy(), None, 0.0
    if schema.bs_dtype == "float8e5m3":
        codec = humming().weight
        stored = codec.encode_e5m3_scale(scale)
        return {"weight_scale": stored}, codec.decode_e5m3_scale(stored).numpy(), None, 0.0
    stored = (
        scale
        if schema.weight_scale_type == "block"
        else scale.to(torch_dtype(schema.bs_dtype or param_dtype))
    )
    return {"weight_scale": stored}, stored.float().numpy(), None, 0.0


def _two_level(
    scale: torch.Tensor,
    schema: TargetSchema,
    param_dtype: str,
    amax: torch.Tensor | None,
    given: _Scales | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Group scales in fp8 under a second scale: (stored scale, stored scale_2, float scale_2, code limit).

    `scale` is the unrounded group scale amax_g / code_max, float32 [N, G] on any device; `amax` the shared
    maximum [1, 1], or None for a second scale per row. All divisions are tensor by tensor, because torch on
    CUDA divides by a Python number with a reciprocal.
    """
    kind, bits, exponent, mantissa = twins.parse_dtype(schema.b_dtype)
    limit = twins.largest_value(kind, bits, exponent, mantissa)
    if given is not None:
        return given.group, given.second.reshape(1), given.second, limit
    scale_max = _FP8_MAX[schema.bs_dtype or ""]
    if amax is None:
        scale_2 = scale.amax(-1, keepdim=True) / scale.new_tensor(scale_max)
        kept = scale_2.to(torch_dtype(param_dtype))
        tiny = torch.finfo(kept.dtype).tiny
        kept = torch.where(kept < tiny, torch.full_like(kept, tiny), kept)
        scale_2, stored_2 = kept.float(), kept.reshape(-1)
    else:
        scale_2 = amax / scale.new_tensor(limit * scale_max)
        stored_2 = scale_2.reshape(1)
    stored = (scale / scale_2).clamp(max=scale_max).to(torch_dtype(schema.bs_dtype or ""))
    return stored, stored_2, scale_2, limit


def _store_zero_point(zero: Array, schema: TargetSchema, param_dtype: str) -> tuple[torch.Tensor, Array]:
    """The stored zero point (integers packed along N) and the float32 value it decodes to, [N, G]."""
    if schema.is_fp_zero_point:
        stored = torch.from_numpy(zero).to(torch_dtype(param_dtype))
        return stored, stored.float().numpy()
    codes = torch.from_numpy(zero).to(torch.int32)
    packed = twins.pack_weight(codes.t().contiguous(), schema.num_bits).t().contiguous()
    return packed, zero


# --- CUDA: Humming's ops -----------------------------------------------------------------------------------


def _quantize_cuda(
    matrices: Sequence[torch.Tensor],
    schema: TargetSchema,
    param_dtype: str,
    given: Sequence[_Scales] | None,
    count_exact: bool,
) -> list[Quantized]:
    target = humming_schema(schema)
    if schema.is_coupled or schema.weight_scale_2_type != "none":
        shared = torch.stack([m.abs().amax() for m in matrices]).amax().float().clamp_min(1e-30)
        each: Sequence[_Scales | None] = given or [None] * len(matrices)
        packed = [
            _encode_shared_cuda(m, schema, param_dtype, shared, g)
            for m, g in zip(matrices, each, strict=True)
        ]
    else:
        packed = [target.quant_tensor(m, target, torch_dtype(param_dtype)) for m in matrices]
    num_groups = _num_groups(matrices[0].shape, schema) if count_exact else 0
    return [_with_error_cuda(m, p, target, num_groups) for m, p in zip(matrices, packed, strict=True)]


def _encode_shared_cuda(
    matrix: torch.Tensor,
    schema: TargetSchema,
    param_dtype: str,
    shared: torch.Tensor,
    given: _Scales | None,
) -> dict[str, torch.Tensor]:
    kind, bits, exponent, mantissa = twins.parse_dtype(schema.b_dtype)
    largest = shared.new_tensor(twins.largest_value(kind, bits, exponent, mantissa))
    values = matrix.float()
    if schema.weight_scale_type == "tensor":
        scale = (shared / largest).reshape(1)
        tensors = {"weight_scale": scale}
        scaled = values * scale.reciprocal()
    else:
        grouped = values.view(values.size(0), -1, schema.weight_scale_group_size)
        group_scale = grouped.abs().amax(-1).clamp_min(1e-30) / largest
        amax = shared.view(1, 1) if schema.weight_scale_2_type == "tensor" else None
        stored, stored_2, scale_2, limit = _two_level(group_scale, schema, param_dtype, amax, given)
        tensors = {"weight_scale": stored, "weight_scale_2": stored_2}
        effective = stored.float() * scale_2
        inverse = torch.where(effective > 0, effective.reciprocal(), torch.zeros_like(effective))
        scaled = (grouped * inverse.unsqueeze(-1)).clamp(-limit, limit).view_as(values)
    codes, _, _ = humming().ops.quant_weight(
        scaled.contiguous(),
        source_dtype_str="float32",
        target_dtype_str=schema.b_dtype,
        group_size=0,
        has_scale=False,
        use_e8m0_scale=False,
        has_zero_point=False,
        is_fp_zero_point=False,
    )
    tensors["weight"] = humming().ops.pack_weight(codes, bits)
    return tensors


def _with_error_cuda(
    matrix: torch.Tensor, tensors: dict[str, torch.Tensor], schema: Any, num_groups: int
) -> Quantized:
    values = matrix.double()
    difference = values - schema.dequant_tensors(dict(tensors)).double()
    exact = (difference.view(num_groups, -1) == 0).all(-1).sum() if num_groups else 0
    sums = torch.stack([_fold_sum(_fold_sum(x * x)) for x in (difference, values)]).tolist()
    return Quantized(tensors, Cost(sums[0], sums[1], int(exact), num_groups), bool(np.isfinite(sums[1])))


def _fold_sum(terms: torch.Tensor) -> torch.Tensor:
    """`loops.fold_sum` over the last dimension; overwrites `terms`."""
    length = terms.size(-1)
    while length > 1:
        half = (length + 1) // 2
        terms[..., : length - half] += terms[..., half:length]
        length = half
    return terms[..., 0]
