"""Quantization on the CPU: compiled loops over one matrix at a time.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hqconv.backends import loops, twins
from hqconv.backends.encoded import Cost, Quantized, num_groups
from hqconv.backends.encoders import encoder
from hqconv.backends.runtime import humming
from hqconv.backends.scales import GivenScales, two_level
from hqconv.backends.twins import Array
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.target import TargetSchema


@dataclass
class _Ranges:
    """Highest and lowest value per group, float32 [N, G] (one row of blocks per block of rows)."""

    source: Array
    highest: Array
    lowest: Array
    is_finite: bool
    fused: bool  # see `twins.FUSED_GROUP_SIZE`


def quantize(
    matrices: Sequence[torch.Tensor],
    schema: TargetSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
) -> list[Quantized]:
    """`hqconv.backends.quantize.quantize` of matrices on the CPU."""
    ranges = [_measure(matrix, schema) for matrix in matrices]
    shared = None
    if schema.is_coupled:
        shared = np.max([np.maximum(r.highest, -r.lowest).max() for r in ranges]).astype(np.float32)
    each: Sequence[GivenScales | None] = given or [None] * len(ranges)
    return [
        _encode(r, _groups(r, schema, param_dtype, shared, g), schema, count_exact)
        for r, g in zip(ranges, each, strict=True)
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


@dataclass
class _Groups:
    """What the loop reads of each group, [N, G] or one row for a block of rows, and the tensors that are stored of it.

    The names are those of `encoders.encoder`; `scale_2` is [1, 1], [N, 1], or None where there is none.
    """

    tensors: dict[str, torch.Tensor]
    inverse: Array
    lowest: Array
    scale: Array
    zero: Array
    scale_2: Array | None
    limit: float


def _code(schema: TargetSchema) -> tuple[int, int, int, int]:
    kind, *rest = twins.parse_dtype(schema.b_dtype)
    bits, exponent, mantissa = rest
    return loops.ASYM_INT if schema.has_zero_point else kind, bits, exponent, mantissa


@np.errstate(all="ignore")
def _groups(
    ranges: _Ranges, schema: TargetSchema, param_dtype: str, shared: Any, given: GivenScales | None
) -> _Groups:
    """Scales and zero points of a matrix as they are stored, and what encoding with them needs."""
    highest, lowest = ranges.highest, ranges.lowest
    if schema.weight_scale_type == "tensor":
        highest, lowest = np.full_like(highest, shared), np.full_like(lowest, -shared)
    scale, lowest, zero = twins.group_scales(
        _code(schema),
        highest,
        lowest,
        e8m0=schema.bs_dtype == "float8e8m0",
        negative=schema.bs_dtype != "float8e5m3",
        fp_zero=schema.is_fp_zero_point,
        fused=ranges.fused,
    )
    stored = torch.from_numpy(scale)
    tensors, decode_scale, scale_2, limit = _store_scales(stored, schema, param_dtype, shared, given)
    inverse = np.float32(1) / scale
    if scale_2 is not None:
        effective = decode_scale * scale_2
        inverse = np.where(effective > 0, np.float32(1) / effective, np.float32(0))
    if schema.has_zero_point:
        tensors["zero_point"], zero = _store_zero_point(zero, schema, param_dtype)
    return _Groups(tensors, inverse, lowest, decode_scale, zero, scale_2, limit)


def _encode(ranges: _Ranges, groups: _Groups, schema: TargetSchema, count_exact: bool) -> Quantized:
    """Codes of a matrix, packed, and its cost."""
    num_rows, num_columns = ranges.source.shape

    def per_row(values: Array) -> Array:
        block_rows = num_rows // values.shape[0]
        return np.ascontiguousarray(np.repeat(values, block_rows, axis=0) if block_rows > 1 else values)

    packed = np.empty((num_rows, num_columns * schema.num_bits // 8), np.uint8)
    sums, exact = np.empty((2, num_rows)), np.zeros(num_rows if count_exact else 0, np.int64)
    second = np.ones((1, 1), np.float32) if groups.scale_2 is None else groups.scale_2
    encoder(_code(schema))(
        ranges.source,
        np.float32(groups.limit),
        (
            per_row(groups.inverse),
            per_row(groups.lowest),
            per_row(groups.scale),
            per_row(groups.zero),
            np.ascontiguousarray(np.broadcast_to(second, (num_rows, 1))).reshape(-1),
        ),
        (packed, *sums, exact),
    )
    tensors = {**groups.tensors, "weight": torch.from_numpy(packed.view(np.int32))}
    counted = num_groups(ranges.source.shape, schema) if count_exact else 0
    error, power = (float(loops.fold_sum(one)) for one in sums)
    return Quantized(tensors, Cost(error, power, int(exact.sum()), counted), ranges.is_finite)


def _store_scales(
    scale: torch.Tensor, schema: TargetSchema, param_dtype: str, shared: Any, given: GivenScales | None
) -> tuple[dict[str, torch.Tensor], Array, Array | None, float]:
    """Stored scale tensors, the float32 scales they decode to, scale_2 as [1, 1] or [N, 1], and the clamp."""
    if schema.weight_scale_type == "tensor":
        return {"weight_scale": scale.reshape(1)}, scale.numpy(), None, 0.0
    if schema.weight_scale_2_type != "none":
        amax = torch.full((1, 1), float(shared)) if schema.weight_scale_2_type == "tensor" else None
        stored, scale_2_tensor, scale_2, limit = two_level(scale, schema, param_dtype, amax, given)
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
        else scale.to(torch_dtype_of(schema.bs_dtype or param_dtype))
    )
    return {"weight_scale": stored}, stored.float().numpy(), None, 0.0


def _store_zero_point(zero: Array, schema: TargetSchema, param_dtype: str) -> tuple[torch.Tensor, Array]:
    """The stored zero point (integers packed along N) and the float32 value it decodes to, [N, G]."""
    if schema.is_fp_zero_point:
        stored = torch.from_numpy(zero).to(torch_dtype_of(param_dtype))
        return stored, stored.float().numpy()
    codes = torch.from_numpy(zero).to(torch.int32)
    packed = twins.pack_weight(codes.t().contiguous(), schema.num_bits).t().contiguous()
    return packed, zero
