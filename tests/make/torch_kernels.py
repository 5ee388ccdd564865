"""The kernels of `triton_kernels` and `triton_compensation` by torch's operations: their reference, on any device.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, T tiles, U units of decision.
"""

from __future__ import annotations

from typing import Any

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.kernel_layout.runtime import humming
from hqconv.quantization.quantized import TileFactors, code_of, fold_sum
from hqconv.quantization.scale_search import CandidateScales, Ladder, sweep_each
from hqconv.schemas.weight_schema import WeightSchema

CHUNK = 1 << 20  # weights whose errors are computed at once, in float64


def error_sums(stack: torch.Tensor, tensors: dict[str, torch.Tensor], schema: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of (w - decoded)**2 and of w**2 of each matrix, float64 [E] each; `schema` is Humming's."""
    values = stack.double()
    difference = values - schema.dequant_tensors(dict(tensors)).double()
    return fold_sum(fold_sum(difference.square_())), fold_sum(fold_sum(values.square_()))


def code_values(schema: Any, device: torch.device) -> None:
    """No table: `row_errors` decodes with Humming's operations."""


def row_errors(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    table: None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Squared error of each row's part of each group under `scales`, float64 [E, N, G].

    words: packed codes; None to choose codes for the scales. importance: weight of each column's error, float64
    [1 or E, K].
    """
    num_groups, ops = scales.scale.size(2), humming().ops
    out = torch.empty(*stack.shape[:2], num_groups, dtype=torch.float64, device=stack.device)
    for e, rows in _chunks(stack):
        values, groups = stack[e, rows].float(), _of_rows(scales, stack, e, rows)
        if words is None:
            numbers = _numbers(values, groups, schema)
        else:
            numbers = _meaning(ops.unpack_weight(words[e, rows].contiguous(), schema.num_bits), schema)
        terms = (values.double() - _decode(numbers, groups).double()).square_()
        if importance is not None:
            terms *= importance[e % len(importance)]
        out[e, rows] = fold_sum(terms.view(len(values), num_groups, -1))
    return out


def row_fits(
    stack: torch.Tensor, scales: CandidateScales, schema: WeightSchema, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of w * v and of v * v, float64 [E, N, G] each: v, what the weight's code stands for, less the zero point."""
    num_groups = scales.scale.size(2)
    out = torch.empty(2, *stack.shape[:2], num_groups, dtype=torch.float64, device=stack.device)
    for e, rows in _chunks(stack):
        values, groups = stack[e, rows].float(), _of_rows(scales, stack, e, rows)
        numbers = _numbers(values, groups, schema)
        if groups.zero is not None:
            numbers = numbers - _spread(groups.zero, values.size(1))
        for index, terms in enumerate((values.double() * numbers.double(), numbers.double().square())):
            weighted = terms if importance is None else terms * importance[e % len(importance)]
            out[index, e, rows] = fold_sum(weighted.view(len(values), num_groups, -1))
    return out[0], out[1]


def can_sweep(schema: WeightSchema) -> bool:
    """True for every schema that has scales of rows: `sweep` tries them all."""
    return schema.weight_scale_type in ("group", "channel")


def sweep(
    stack: torch.Tensor,
    start: CandidateScales,
    least: torch.Tensor,
    ladder: Ladder,
    floor: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of the best scales and their errors: every step below the limit is tried."""
    amax = stack.float().abs().view(*stack.shape[:2], start.scale.size(2), -1).amax(-1).clamp_min(1e-30)
    return sweep_each(
        start, least, ladder, floor, amax, lambda tried: row_errors(stack, tried, None, None, schema, importance)
    )


def _chunks(stack: torch.Tensor) -> list[tuple[int, slice]]:
    """(expert, rows) of parts of a stack that are not too large."""
    num_experts, num_rows, num_columns = stack.shape
    step = max(1, CHUNK // num_columns)
    return [(e, slice(begin, begin + step)) for e in range(num_experts) for begin in range(0, num_rows, step)]


def _of_rows(scales: CandidateScales, stack: torch.Tensor, expert: int, rows: slice) -> CandidateScales:
    """The scales of some rows of one matrix, [rows, G] each; `second` is [rows, 1] or [1, 1]."""
    num_rows = stack.size(1)
    begin, end, _ = rows.indices(num_rows)

    def of(values: torch.Tensor) -> torch.Tensor:
        one, per_scale = values[expert], num_rows // values.size(1)
        if per_scale == num_rows:
            return one
        if per_scale == 1:
            return one[rows]
        index = torch.arange(begin, end, device=one.device) // per_scale
        return one[index]

    second, zero = scales.second, scales.zero
    return CandidateScales(
        of(scales.scale), of(scales.scale), None if zero is None else of(zero), None if second is None else of(second)
    )


def _spread(values: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Values [rows, G] for each of the columns."""
    return values.repeat_interleave(num_columns // values.size(1), dim=1)


def _decode(numbers: torch.Tensor, scales: CandidateScales) -> torch.Tensor:
    """Decoded weights float32 [rows, K] of what codes stand for; every product is rounded once."""
    num_columns = numbers.size(1)
    if scales.zero is not None:
        numbers = numbers - _spread(scales.zero, num_columns)
    numbers = numbers * _spread(scales.scale, num_columns)
    return numbers if scales.second is None else numbers * scales.second


def _numbers(values: torch.Tensor, scales: CandidateScales, schema: WeightSchema) -> torch.Tensor:
    """What the codes of weights [rows, K] stand for, before zero point and scale, float32; as `encoders`."""
    kind, bits, exponent, mantissa = code = code_of(schema)
    lowest, num_columns = scales.lowest(), values.size(1)
    if lowest is not None:
        values = (values.double() - _spread(lowest, num_columns).double()).float()
    x = values * _spread(scales.inverse(), num_columns)
    if kind == arithmetic.FLOAT:
        return _rounded_float(x, exponent, mantissa, arithmetic.largest_value(*code))
    highest = float(2**bits - 1 if kind == arithmetic.ASYM_INT else 2 ** (bits - 1) - 1)
    least = {arithmetic.ASYM_INT: 0.0, arithmetic.SYM_INT: -highest - 1}.get(kind, -highest)
    return torch.round(x).clamp_(least, highest)


def _rounded_float(x: torch.Tensor, exponent: int, mantissa: int, largest: float) -> torch.Tensor:
    """The nearest small float, ties to the truncated one, saturated."""
    shift, drop = 128 - (1 << (exponent - 1)), 23 - mantissa
    bias, threshold_bits = shift << 23, (shift + 1) << 23
    magnitude = x.abs().clamp_(max=largest)
    bits = magnitude.view(torch.int32)
    subnormal = (magnitude + 2.0 ** (shift - 126)).view(torch.int32) - threshold_bits
    scaled = torch.where(bits < threshold_bits, subnormal, bits - bias)
    rounded = (scaled + ((1 << (drop - 1)) - 1)) >> drop
    kept = rounded << drop
    small = (kept + threshold_bits).view(torch.float32) - 2.0 ** (shift - 126)
    return torch.where(rounded >= 1 << mantissa, (kept + bias).view(torch.float32), small).copysign_(x)


def _meaning(codes: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """What codes int32 [rows, K] stand for, before zero point and scale."""
    kind, bits, exponent, mantissa = code_of(schema)
    if kind == arithmetic.ASYM_INT:
        return codes.float()
    if kind == arithmetic.SYM_INT:
        return (codes - (1 << (bits - 1))).float()
    values: torch.Tensor = humming().ops.dequant_weight(codes.contiguous(), exponent, mantissa, True)
    return values


def _codes(numbers: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """The codes, int32, of what they stand for."""
    kind, bits, exponent, mantissa = code_of(schema)
    if kind == arithmetic.ASYM_INT:
        return numbers.int()
    if kind == arithmetic.SYM_INT:
        return numbers.int() + (1 << (bits - 1))
    magnitude = numbers.abs()
    if kind != arithmetic.FLOAT:
        return magnitude.int() | ((numbers < 0).int() << (bits - 1))
    sign = torch.signbit(numbers).int() << (bits - 1)
    shift, drop = 128 - (1 << (exponent - 1)), 23 - mantissa
    threshold = 2.0 ** (shift - 126)
    subnormal = (magnitude + threshold).view(torch.int32) - ((shift + 1) << 23)
    normal = magnitude.view(torch.int32) - (shift << 23)
    return (torch.where(magnitude < threshold, subnormal, normal) >> drop) | sign


def chosen_codes(
    stack: torch.Tensor, scales: CandidateScales, changed: torch.Tensor, words: torch.Tensor, schema: WeightSchema
) -> torch.Tensor:
    """Int32 [E, N, K]: codes of groups that `changed`, of the others those packed in `words`; by torch's operations."""
    codes = torch.empty(stack.shape, dtype=torch.int32, device=stack.device)
    for e, rows in _chunks(stack):
        values, groups = stack[e, rows].float(), _of_rows(scales, stack, e, rows)
        mask = _of_rows(CandidateScales(changed, changed, None, None), stack, e, rows).scale
        kept = humming().ops.unpack_weight(words[e, rows].contiguous(), schema.num_bits)
        new = _codes(_numbers(values, groups, schema), schema)
        codes[e, rows] = torch.where(_spread(mask, values.size(1)), new, kept)
    return codes


def tile_losses(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    table: None,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Loss of each tile of each row, float64 [E, N, T]: of the codes `words`, or of compensated ones."""
    return _in_tiles(stack, scales, words, schema, factors)[0]


def compensated_codes(
    stack: torch.Tensor,
    scales: CandidateScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Int32 [E, N, K]: compensated codes in units that `changed` [E, N, U], of the others those packed in `words`."""
    new = _in_tiles(stack, scales, None, schema, factors)[1]
    num_columns, width = stack.size(2), factors.order.size(1) * (len(factors.order) // changed.size(2))
    mask = changed.repeat_interleave(width, dim=2)[..., :num_columns]
    flat = words.reshape(-1, words.size(-1)).contiguous()
    return torch.where(mask, new, humming().ops.unpack_weight(flat, schema.num_bits).view(stack.shape))


def _in_tiles(
    stack: torch.Tensor, scales: CandidateScales, words: torch.Tensor | None, schema: WeightSchema, factors: TileFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [E, N, T] and codes [E, N, K]: all rows of a matrix at once, columns one after the other."""
    num_experts, num_rows, num_columns = stack.shape
    num_tiles, width = factors.order.shape
    group_size = num_columns // scales.scale.size(2)
    losses = torch.zeros(num_experts, num_rows, num_tiles, dtype=torch.float64, device=stack.device)
    codes = torch.zeros(stack.shape, dtype=torch.int32, device=stack.device)
    for e in range(num_experts):
        groups = _of_rows(scales, stack, e, slice(0, num_rows))
        stored = None if words is None else humming().ops.unpack_weight(words[e].contiguous(), schema.num_bits)
        for t in range(num_tiles):
            correction = losses.new_zeros(num_rows, width)
            for j in range(min(width, num_columns - t * width)):
                k = t * width + int(factors.order[t, j])
                column = _columns_of(groups, k // group_size)
                weight = stack[e, :, k : k + 1].double()
                wanted = weight + correction[:, j : j + 1]
                if stored is None:
                    largest = torch.finfo(torch.float32).max
                    numbers = _numbers(wanted.clamp(-largest, largest).float(), column, schema)
                    codes[e, :, k] = _codes(numbers, schema)[:, 0]
                else:
                    numbers = _meaning(stored[:, k : k + 1], schema)
                value = _decode(numbers, column).double()
                off = wanted - value
                losses[e, :, t] += ((off * off) * factors.penalty[t, j])[:, 0]
                correction += (weight - value) * factors.feedback[t, j]
    return losses, codes


class _FiniteScales(CandidateScales):
    """Scales whose inverse is 0 where it would be infinite."""

    def inverse(self) -> torch.Tensor:
        inverse = super().inverse()
        return inverse.masked_fill(~torch.isfinite(inverse), 0.0)


def _columns_of(scales: CandidateScales, group: int) -> CandidateScales:
    """The scales of one group, [rows, 1]."""
    one, zero = scales.scale[:, group : group + 1].contiguous(), scales.zero
    return _FiniteScales(one, one, None if zero is None else zero[:, group : group + 1].contiguous(), scales.second)
