"""Quantization on the CPU: compiled loops over the rows of a stack.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic
from hqconv.cpu_loops.compensation import compensating_encoder, loss_meter
from hqconv.cpu_loops.encoders import BFLOAT16, E8M0, GIVEN, encoder, scorer
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.humming_layout import cpu_ops
from hqconv.humming_layout.cpu_ops import Array
from hqconv.humming_layout.runtime import humming
from hqconv.quantization.gptq import CompensationStart, compensate, inverse_of
from hqconv.quantization.quantized import (
    RTN,
    HessianFactors,
    QuantizedStack,
    Quantizer,
    TileFactors,
    code_of,
    num_groups,
)
from hqconv.quantization.scale_search import CandidateScales, SearchResult, SearchStart, scales_of, search, tensors_of
from hqconv.quantization.two_level_scales import GivenScales, two_level
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: Quantizer = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks on the CPU; see `hqconv.quantization.quantize.quantize_stacks`."""
    is_plain = quantizer.name == RTN.name
    if is_plain and (scales := _row_scales(schema, param_dtype)) != GIVEN:
        return [_encode_in_one_pass(stack, schema, scales, count_exact) for stack in stacks]
    ranges = [_measure(stack, schema) for stack in stacks]
    shared = None
    if schema.is_coupled:
        widest = [np.maximum(r.highest, -r.lowest).reshape(len(stacks[0]), -1).max(axis=1) for r in ranges]
        shared = np.max(widest, axis=0).astype(np.float32)
    each: Sequence[GivenScales | None] = given or [None] * len(ranges)
    groups = [_groups(r, schema, param_dtype, shared, g) for r, g in zip(ranges, each, strict=True)]
    if given is None and not is_plain:
        rounded, groups = groups, search_scales(ranges, groups, schema, param_dtype, quantizer.importance)
        if quantizer.factors is not None:
            return _compensated(ranges, rounded, groups, schema, param_dtype, quantizer.factors, count_exact)
    return [_encode(r, g, schema, count_exact) for r, g in zip(ranges, groups, strict=True)]


def _measure(stack: torch.Tensor, schema: WeightSchema) -> Ranges:
    num_experts, num_rows, num_columns = stack.shape
    source = cpu_ops.as_bits(stack).reshape(-1, num_columns)
    group = schema.weight_scale_group_size or num_columns
    highest, lowest = np.empty((2, len(source), num_columns // group), np.float32)
    in_parts(
        lambda rows: arithmetic.group_ranges(source[rows], group, highest[rows], lowest[rows]), len(source), LEAST_ROWS
    )
    if schema.weight_scale_type in ("block", "tensor"):
        rows = schema.weight_scale_group_size_n if schema.weight_scale_type == "block" else num_rows
        blocks = (len(source) // rows, rows, -1)
        highest, lowest = highest.reshape(blocks).max(axis=1), lowest.reshape(blocks).min(axis=1)
    fused = stack.dtype == torch.float32 and group <= cpu_ops.FUSED_GROUP_SIZE
    return Ranges(source, (num_experts, num_rows, num_columns), highest, lowest, fused)


@np.errstate(all="ignore")
def _groups(ranges: Ranges, schema: WeightSchema, param_dtype: str, shared: Any, given: GivenScales | None) -> Groups:
    """Return scales and zero points of a stack in stored form, and the encoder's inputs."""
    highest, lowest, num_experts = ranges.highest, ranges.lowest, ranges.shape[0]
    if schema.weight_scale_type == "tensor":
        highest, lowest = shared[:, None], -shared[:, None]
    scale, lowest, zero = cpu_ops.group_scales(
        code_of(schema),
        highest,
        lowest,
        e8m0=schema.bs_dtype == "float8e8m0",
        negative=schema.bs_dtype != "float8e5m3",
        fp_zero=schema.is_fp_zero_point,
        fused=ranges.fused,
    )
    stack = torch.from_numpy(scale).view(num_experts, -1, scale.shape[-1])
    tensors, decode_scale, scale_2, limit = _store_scales(stack, schema, param_dtype, shared, given)
    if scale_2 is None:
        inverse = np.float32(1) / scale
    else:
        inverse = decode_scale * per_row(scale_2, len(decode_scale))
        np.divide(np.float32(1), inverse, out=inverse, where=inverse > 0)  # else 0, as it is, or NaN
        inverse[~(inverse > 0)] = 0
    if schema.has_zero_point:
        stored, zero = _store_zero_point(zero, schema, param_dtype)
        tensors["zero_point"] = stored.reshape(num_experts, -1, stored.size(-1))
    return Groups(tensors, inverse, lowest, decode_scale, zero, scale_2, limit)


def _encode(ranges: Ranges, groups: Groups, schema: WeightSchema, count_exact: bool) -> QuantizedStack:
    """Encode a stack with given groups, and measure its errors."""
    given = groups.per_row(len(ranges.source))
    out = _EncoderOutput(ranges.source, schema, count_exact)
    _run(encoder(code_of(schema)), ranges.source, np.float32(groups.limit), given, out.arrays)
    return out.stack(groups.tensors, ranges.shape)


def _row_scales(schema: WeightSchema, param_dtype: str) -> int:
    """Return the rounding of scales that the encoder can compute row by row; GIVEN if it cannot."""
    if schema.is_coupled or schema.weight_scale_2_type != "none" or schema.has_zero_point or schema.num_bits == 1:
        return GIVEN
    if schema.weight_scale_type not in ("group", "channel"):
        return GIVEN
    return {"float8e8m0": E8M0, "bfloat16": BFLOAT16}.get(schema.bs_dtype or param_dtype, GIVEN)


def _encode_in_one_pass(stack: torch.Tensor, schema: WeightSchema, scales: int, count_exact: bool) -> QuantizedStack:
    """Compute scales, codes and error sums of a stack in one pass."""
    num_experts, num_rows, num_columns = stack.shape
    source = cpu_ops.as_bits(stack).reshape(-1, num_columns)
    inverse, scale = np.empty(
        (2, len(source), num_columns // (schema.weight_scale_group_size or num_columns)), np.float32
    )
    groups = (inverse, np.zeros((1, 1)), scale, np.zeros((1, 1), np.float32), np.ones(len(source), np.float32))
    out = _EncoderOutput(source, schema, count_exact)
    _run(encoder(code_of(schema), scales), source, cpu_ops.NO_LIMIT, groups, out.arrays)
    kept = torch.from_numpy(scale).view(num_experts, num_rows, -1)
    if scales == E8M0:
        stored = (kept.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        stored = kept.to(torch.bfloat16)  # exact: rounded already
    return out.stack({"weight_scale": stored}, (num_experts, num_rows, num_columns))


def _run(
    encode: Any,
    source: Array,
    limit: Any,
    groups: tuple[Array, ...],
    out: tuple[Array, ...],
    factors: tuple[Array, ...] | None = None,
    changed: Array | None = None,
) -> None:
    """Run an encoder over all rows, in helper threads. Arrays of one row hold for every row.

    factors, changed: of `compensation.compensating_encoder`.
    """

    def of(arrays: tuple[Array, ...], rows: slice) -> tuple[Array, ...]:
        return tuple(one[rows] if len(one) == len(source) else one for one in arrays)

    def run(rows: slice) -> None:
        more = () if changed is None else (factors, changed[rows])
        encode(source[rows], limit, of(groups, rows), *more, of(out, rows))

    in_parts(run, len(source), LEAST_ROWS)


class _EncoderOutput:
    """Arrays that an encoder writes: packed codes, and each row's error, power and number of exact groups."""

    def __init__(self, source: Array, schema: WeightSchema, count_exact: bool) -> None:
        num_rows, num_columns = source.shape
        self._packed = np.empty((num_rows, num_columns * schema.num_bits // 8), np.uint8)
        self._sums, self._exact = np.empty((2, num_rows)), np.zeros(num_rows if count_exact else 0, np.int64)
        self._schema, self._count_exact = schema, count_exact

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Arrays in the encoder's order."""
        return self._packed, self._sums[0], self._sums[1], self._exact

    def stack(self, tensors: dict[str, torch.Tensor], shape: tuple[int, int, int]) -> QuantizedStack:
        """Return the result for a stack [E, N, K], with its scales and zero points."""
        num_experts, num_rows, num_columns = shape
        weight = torch.from_numpy(self._packed.view(np.int32)).view(num_experts, num_rows, -1)
        error, power = arithmetic.fold_rows(self._sums.reshape(2 * num_experts, -1)).reshape(2, num_experts)
        return QuantizedStack(
            {**tensors, "weight": weight},
            torch.from_numpy(error),
            torch.from_numpy(power),
            torch.from_numpy(self._exact.reshape(num_experts, -1).sum(axis=1)),
            num_groups((num_rows, num_columns), self._schema) if self._count_exact else 0,
        )


def _store_scales(
    scale: torch.Tensor, schema: WeightSchema, param_dtype: str, shared: Any, given: GivenScales | None
) -> tuple[dict[str, torch.Tensor], Array, Array | None, float]:
    """Return stored scales of [E, rows, G], their float32 values [R, G], scale_2 [R, 1], and the clamp limit."""

    def rows(values: torch.Tensor) -> Array:
        flat: Array = values.reshape(-1, values.size(-1)).numpy()
        return flat

    if schema.weight_scale_type == "tensor":
        return {"weight_scale": scale.flatten()}, rows(scale), None, 0.0
    if schema.weight_scale_2_type != "none":
        amax = torch.from_numpy(shared).view(-1, 1, 1) if schema.weight_scale_2_type == "tensor" else None
        stored, scale_2_tensor, scale_2, limit = two_level(scale, schema, param_dtype, amax, given)
        tensors = {"weight_scale": stored, "weight_scale_2": scale_2_tensor}
        return tensors, _values_of(rows(stored.view(torch.uint8)), stored.dtype), rows(scale_2), limit
    if schema.bs_dtype == "float8e8m0":
        stored = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight_scale": stored}, rows(scale), None, 0.0
    if schema.bs_dtype == "float8e5m3":
        codec = humming().weight
        stored = codec.encode_e5m3_scale(scale)
        return {"weight_scale": stored}, rows(codec.decode_e5m3_scale(stored)), None, 0.0
    is_block = schema.weight_scale_type == "block"
    stored = scale if is_block else scale.to(torch_dtype_of(schema.bs_dtype or param_dtype))
    return {"weight_scale": stored}, rows(stored.float()), None, 0.0


def _values_of(codes: Array, dtype: torch.dtype) -> Array:
    """Return the float32 values of 8-bit floats by a table, which is faster than torch's conversion."""
    return _tables(dtype)[codes]


@functools.cache
def _tables(dtype: torch.dtype) -> Array:
    table: Array = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return table


def _store_zero_point(zero: Array, schema: WeightSchema, param_dtype: str) -> tuple[torch.Tensor, Array]:
    """Return the stored zero point (integers packed along N) and its float32 value, of rows [R, G]."""
    if schema.is_fp_zero_point:
        stored = torch.from_numpy(zero).to(torch_dtype_of(param_dtype))
        return stored, stored.float().numpy()
    codes = torch.from_numpy(zero).to(torch.int32)
    packed = cpu_ops.pack_weight(codes.t().contiguous(), schema.num_bits).t().contiguous()
    return packed, zero


LEAST_ROWS = 64  # of one helper thread's part of a loop


@dataclass
class Ranges:
    """Highest and lowest value of each group, float32 [R, G]: R counts rows, row blocks, or matrices of the stack."""

    source: Array
    shape: tuple[int, int, int]
    highest: Array
    lowest: Array
    fused: bool  # see `cpu_ops.FUSED_GROUP_SIZE`


@dataclass
class Groups:
    """The encoder's inputs for each group, [R, G] as in `Ranges`, and the tensors that are stored.

    Fields as in `encoders.encoder`; `scale_2` has a row for each row or matrix, or is None.
    """

    tensors: dict[str, torch.Tensor]
    inverse: Array
    lowest: Array
    scale: Array
    zero: Array
    scale_2: Array | None
    limit: float

    def per_row(self, num_rows: int) -> tuple[Array, ...]:
        """Return (inverse, lowest, scale, zero, scale_2) for an encoder: with `num_rows` rows, or one for all rows."""
        scale_2 = np.ones((1, 1), np.float32) if self.scale_2 is None else self.scale_2
        values = (self.inverse, self.lowest, self.scale, self.zero)
        return (*(per_row(one, num_rows) for one in values), per_row(scale_2, num_rows).reshape(-1))


def per_row(values: Array, num_rows: int) -> Array:
    """Repeat values [R, …] so that each of `num_rows` rows has its own."""
    block_rows = num_rows // len(values)
    return np.ascontiguousarray(np.repeat(values, block_rows, axis=0) if block_rows > 1 else values)


def search_scales(
    ranges: Sequence[Ranges],
    groups: Sequence[Groups],
    schema: WeightSchema,
    param_dtype: str,
    importance: torch.Tensor | None,
) -> list[Groups]:
    """Replace the round-to-nearest scales of stacks by the ones with the least error; see `scale_search.search`."""
    starts = [_search_start(r, g, schema, importance) for r, g in zip(ranges, groups, strict=True)]
    found = search(starts, schema, param_dtype)
    return [_replaced(g, f, schema, param_dtype) for g, f in zip(groups, found, strict=True)]


def _search_start(ranges: Ranges, groups: Groups, schema: WeightSchema, importance: torch.Tensor | None) -> SearchStart:
    code, (num_experts, num_rows, num_columns) = code_of(schema), ranges.shape
    score, total = scorer(code), num_experts * num_rows
    weights = np.ones(num_columns) if importance is None else importance.double().numpy()
    num_groups = num_columns // (schema.weight_scale_group_size or num_columns)
    groups = replace(groups, limit=arithmetic.largest_value(*code) if code[0] == arithmetic.FLOAT else 0.0)

    def errors(one: Groups) -> torch.Tensor:
        out, values = np.empty((total, num_groups)), one.per_row(total)

        def run(rows: slice) -> None:
            of_rows = tuple(value[rows] if len(value) == total else value for value in values)
            score(ranges.source[rows], np.float32(one.limit), of_rows, weights, out[rows])

        in_parts(run, total, LEAST_ROWS)
        return torch.from_numpy(out).view(num_experts, num_rows, num_groups)

    scales = scales_of(groups.tensors, schema)
    return SearchStart(scales, errors(groups), lambda tried: errors(_with_scales(groups, tried)))


def _rows(values: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = values.reshape(-1, values.size(-1)).numpy()
    return flat


def _with_scales(
    groups: Groups, scales: CandidateScales, changed: torch.Tensor | None = None, inverse: torch.Tensor | None = None
) -> Groups:
    """Return the groups with other scales, where `changed` holds (None: everywhere).

    inverse: the factor from weights to codes, if it is not the scales' own.
    """
    inverse, lowest, zero = scales.inverse() if inverse is None else inverse, scales.lowest(), scales.zero
    mask = None if changed is None else _rows(changed)

    def chosen(new: torch.Tensor, old: np.ndarray) -> np.ndarray:
        return _rows(new) if mask is None else np.where(mask, _rows(new), old)

    return replace(
        groups,
        inverse=chosen(inverse, groups.inverse),
        scale=_rows(scales.scale),
        lowest=groups.lowest if lowest is None else chosen(lowest.double(), groups.lowest),
        zero=groups.zero if zero is None else _rows(zero),
    )


def _replaced(groups: Groups, found: SearchResult, schema: WeightSchema, param_dtype: str) -> Groups:
    """Return the groups with the chosen scales, saturating: under a smaller scale weights exceed the largest code."""
    kind = code_of(schema)
    limit = arithmetic.largest_value(*kind) if kind[0] == arithmetic.FLOAT else 0.0
    tensors = {**groups.tensors, **tensors_of(found.scales, schema, param_dtype)}
    return replace(_with_scales(groups, found.scales, found.changed), tensors=tensors, limit=limit)


def _compensated(
    ranges: Sequence[Ranges],
    rounded: Sequence[Groups],
    best: Sequence[Groups],
    schema: WeightSchema,
    param_dtype: str,
    factors: HessianFactors,
    count_exact: bool,
) -> list[QuantizedStack]:
    """Encode stacks with error compensation, starting from the scales of `mse`; see `gptq.compensate`."""
    starts = [
        _compensation_start(one, before, after, schema)
        for one, before, after in zip(ranges, rounded, best, strict=True)
    ]
    found = compensate(starts, factors, schema, param_dtype)
    encode, done = compensating_encoder(code_of(schema)), []
    for one, groups, choice in zip(ranges, best, found, strict=True):
        changed, total = _rows(choice.of_groups()), len(one.source)
        new = _with_scales(groups, choice.scales, inverse=inverse_of(choice.scales)).per_row(total)
        mixed = tuple(
            np.where(changed, ours, kept) if kept.shape == changed.shape else kept
            for ours, kept in zip(new, groups.per_row(total), strict=True)
        )
        out = _EncoderOutput(one.source, schema, count_exact)
        more = (_arrays(factors.wide), _rows(choice.changed))
        _run(encode, one.source, np.float32(groups.limit), mixed, out.arrays, *more)
        done.append(out.stack({**groups.tensors, **tensors_of(choice.scales, schema, param_dtype)}, one.shape))
    return done


def _compensation_start(ranges: Ranges, rounded: Groups, best: Groups, schema: WeightSchema) -> CompensationStart:
    meter, total = loss_meter(code_of(schema)), len(ranges.source)

    def losses(one: Groups, factors: TileFactors, is_compensated: bool) -> torch.Tensor:
        arrays, values = _arrays(factors), one.per_row(total)
        out = np.empty((total, len(arrays[0])))

        def run(rows: slice) -> None:
            of_rows = tuple(value[rows] if len(value) == total else value for value in values)
            meter(ranges.source[rows], np.float32(one.limit), of_rows, arrays, is_compensated, out[rows])

        in_parts(run, total, LEAST_ROWS)
        return torch.from_numpy(out).view(*ranges.shape[:2], -1)

    return CompensationStart(
        scales_of(rounded.tensors, schema),
        scales_of(best.tensors, schema),
        lambda factors: losses(best, factors, False),
        lambda tried, factors: losses(_with_scales(best, tried, inverse=inverse_of(tried)), factors, True),
    )


def _arrays(factors: TileFactors) -> tuple[Array, ...]:
    return factors.order.numpy(), factors.feedback.numpy(), factors.penalty.numpy()
