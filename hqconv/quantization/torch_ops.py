"""Error sums, least-squares fits, codes and scale sweeps of stacks, by torch's operations: the implementation for GPUs.

The bits are those of the CPU's compiled loops: weights are decoded in float32, each operation is rounded once,
differences are squared in float64, and terms are folded in halves (`fold_sum`). Chunks of rows bound the memory.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, S columns of a group, C rows of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from hqconv.humming_ops.runtime import humming
from hqconv.quantization.group_scales import GroupScales, scales_of
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.dtypes import CodeKind, CodeType
from hqconv.schemas.weight_schema import WeightSchema

_CUDA_WEIGHTS, _CPU_WEIGHTS = (
    1 << 23,
    1 << 18,
)  # of a chunk; each has some 60 bytes of temporary tensors


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows of a stack: float32 weights [C, G, S], their scales [C, G], and second scales [C, 1].

    rows: positions among all rows of the stack.
    """

    rows: slice
    weights: torch.Tensor
    scales: GroupScales


def _chunks(stack: torch.Tensor, scales: GroupScales) -> Iterator[_Chunk]:
    """Yield a stack in chunks."""
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups = num_experts * num_rows, scales.scale.size(2)
    size = max(1, (_CUDA_WEIGHTS if stack.is_cuda else _CPU_WEIGHTS) // num_columns)
    flat = stack.reshape(total, num_columns)
    for begin in range(0, total, size):
        rows = slice(begin, min(begin + size, total))
        second = (
            None if scales.second is None else _of_rows(scales.second.reshape(-1, 1), rows, total)
        )
        of_rows = GroupScales(
            _of_rows(scales.stored.flatten(0, 1), rows, total),
            _of_rows(scales.scale.flatten(0, 1), rows, total),
            None if scales.zero is None else _of_rows(scales.zero.flatten(0, 1), rows, total),
            second,
        )
        yield _Chunk(
            rows, flat[rows].float().view(-1, num_groups, num_columns // num_groups), of_rows
        )


def _of_rows(values: torch.Tensor, rows: slice, total: int) -> torch.Tensor:
    """Return the values of some of `total` rows, from [X, …] that each hold for total / X rows in turn."""
    per_value = total // len(values)
    if per_value == 1:
        return values[rows]
    if len(values) == 1:
        return values.expand(rows.stop - rows.start, *values.shape[1:])
    first, last = rows.start // per_value, (rows.stop - 1) // per_value + 1
    bits = (
        values[first:last].view(torch.uint8) if values.element_size() == 1 else values[first:last]
    )
    each = bits.unsqueeze(1).expand(-1, per_value, *bits.shape[1:]).flatten(0, 1)
    return each[rows.start - first * per_value : rows.stop - first * per_value].view(values.dtype)


def error_sums(
    stack: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    schema: WeightSchema,
    num_exact: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of (w - decoded)**2 and of w**2 of each matrix, float64 [E] each.

    `stack`: [E, N, K]; `tensors`: its packed tensors, as `QuantizedStack.tensors`. num_exact: int64 [E], gets the
    number of scale groups without any error. Does not synchronize.
    """
    num_experts, num_rows, _ = stack.shape
    sums = torch.empty(2, num_experts * num_rows, dtype=torch.float64, device=stack.device)
    exact = torch.empty(num_experts * num_rows, dtype=torch.int64, device=stack.device)
    words = tensors["weight"].flatten(0, 1)
    for chunk in _chunks(stack, scales_of(tensors, schema)):
        numbers = stored_numbers(words[chunk.rows], schema).view(chunk.weights.shape)
        difference = _differences(chunk, chunk.scales, numbers)
        if num_exact is not None:
            exact[chunk.rows] = (difference == 0).all(-1).sum(-1)
        for number, terms in enumerate((difference, chunk.weights.double())):
            sums[number, chunk.rows] = fold_sum(terms.square_().flatten(1))
    if num_exact is not None:
        num_exact.copy_(exact.view(num_experts, num_rows).sum(1))
    error, power = fold_sum(sums.view(2, num_experts, num_rows))
    return error, power


def decoded(tensors: Mapping[str, torch.Tensor], schema: WeightSchema) -> torch.Tensor:
    """Return the values of packed tensors of a stack, as `QuantizedStack.tensors`: float32 [E, N, K]."""
    words = tensors["weight"]
    numbers = stored_numbers(words.flatten(0, 1), schema).view(*words.shape[:2], -1)
    found = torch.empty_like(numbers)
    for chunk in _chunks(numbers, scales_of(tensors, schema)):
        found.flatten(0, 1)[chunk.rows] = decode(chunk.weights, chunk.scales).flatten(1)
    return rotate(found, schema.rotation) if schema.rotation else found


def row_errors(
    stack: torch.Tensor,
    scales: GroupScales,
    words: torch.Tensor | None,
    schema: WeightSchema,
    stored: GroupScales | None = None,
) -> torch.Tensor:
    """Return the squared error of each row's part of each group of a stack [E, N, K], float64 [E, N, G].

    words: packed codes; None to choose codes for the scales. stored: the scales that they are decoded with, if others.
    """
    total = stack.size(0) * stack.size(1)
    out = torch.empty(
        *stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device
    )
    for chunk in _chunks(stack, scales):
        if words is None:
            numbers, _ = nearest_numbers(chunk.weights, chunk.scales, schema)
        else:
            numbers = stored_numbers(words.flatten(0, 1)[chunk.rows], schema).view(
                chunk.weights.shape
            )
        under = chunk.scales
        if stored is not None:
            under = replace(under, scale=_of_rows(stored.scale.flatten(0, 1), chunk.rows, total))
        out.flatten(0, 1)[chunk.rows] = fold_sum(_differences(chunk, under, numbers).square_())
    return out


def row_fits(
    stack: torch.Tensor, scales: GroupScales, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of w * v, of v * v and of w * w of each row and group, float64 [E, N, G] each.

    v: the number of the code that a weight w gets under `scales`, less the zero point.
    """
    out = torch.empty(
        3, *stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device
    )
    for chunk in _chunks(stack, scales):
        numbers, _ = nearest_numbers(chunk.weights, chunk.scales, schema)
        if chunk.scales.zero is not None:
            numbers = numbers - chunk.scales.zero.unsqueeze(-1)
        values, weights = numbers.double(), chunk.weights.double()
        for number, terms in enumerate((values * weights, values * values, weights * weights)):
            out[number].flatten(0, 1)[chunk.rows] = fold_sum(terms)
    return out[0], out[1], out[2]


def chosen_codes(
    stack: torch.Tensor,
    scales: GroupScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
) -> torch.Tensor:
    """Return packed codes int32 [E, N, K * bits / 32]: new ones in groups that `changed` [E, R, G], else `words`."""
    out, total = (
        torch.empty(words.shape, dtype=words.dtype, device=words.device),
        stack.size(0) * stack.size(1),
    )
    for chunk in _chunks(stack, scales):
        kept = humming().ops.unpack_weight(
            words.flatten(0, 1)[chunk.rows].contiguous(), schema.num_bits
        )
        numbers, x = nearest_numbers(chunk.weights, chunk.scales, schema)
        is_new = _of_rows(changed.flatten(0, 1), chunk.rows, total).unsqueeze(-1)
        codes = torch.where(is_new, codes_of(numbers, x, schema), kept.view(numbers.shape)).flatten(
            1
        )
        out.flatten(0, 1)[chunk.rows] = humming().ops.pack_weight(codes, schema.num_bits)
    return out


def _differences(chunk: _Chunk, scales: GroupScales, numbers: torch.Tensor) -> torch.Tensor:
    """Return weights less the decoded ones, float64 [C, G, S]."""
    return chunk.weights.double().sub_(decode(numbers, scales))


def decode(numbers: torch.Tensor, scales: GroupScales) -> torch.Tensor:
    """Decode numbers of codes [C, G, S] under scales [C, G]; every product is rounded once in float32."""
    if scales.zero is not None:
        numbers = numbers - scales.zero.unsqueeze(-1)
    decoded = numbers * scales.scale.unsqueeze(-1)
    return decoded if scales.second is None else decoded.mul_(scales.second.unsqueeze(-1))


def stored_numbers(words: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return the numbers of packed codes, before zero point and scale: float32 [C, K] of int32 [C, K * bits / 32]."""
    _, bits, exponent, mantissa = schema.code_type
    codes: torch.Tensor = humming().ops.unpack_weight(words.contiguous(), bits)
    if schema.is_integer:
        return (codes if schema.has_zero_point else codes.sub_(1 << (bits - 1))).float()
    numbers: torch.Tensor = humming().ops.dequant_weight(codes, exponent, mantissa, True)
    return numbers


def nearest_numbers(
    weights: torch.Tensor, scales: GroupScales, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the codes that weights [C, G, S] get under scales [C, G], and the scaled weights.

    Numbers are those before zero point and scale.
    """
    code, lowest = schema.code_type, scales.lowest()
    x = (
        weights if lowest is None else weights - lowest.unsqueeze(-1)
    ) * scales.inverse().unsqueeze(-1)
    return _round_float(x, code) if code.kind == CodeKind.FLOAT else torch.round(x).clamp_(
        *code.bounds
    ), x


def _round_float(x: torch.Tensor, code: CodeType) -> torch.Tensor:
    """Return the nearest small float, ties to the truncated one, saturated: as `cpu_loops.encoders`."""
    shift, drop = 128 - (1 << (code.exponent_bits - 1)), 23 - code.mantissa_bits
    bias, threshold_bits, threshold = shift << 23, (shift + 1) << 23, 2.0 ** (shift - 126)
    magnitude = x.abs().clamp_(max=code.largest)
    bits = magnitude.view(torch.int32)
    subnormal = (magnitude + threshold).view(torch.int32).sub_(threshold_bits)
    scaled = torch.where(bits < threshold_bits, subnormal, bits - bias)
    kept = ((scaled + ((1 << (drop - 1)) - 1)) >> drop) << drop
    small = (kept + threshold_bits).view(torch.float32).sub_(threshold)
    is_normal = kept >= 1 << 23
    return torch.where(is_normal, (kept + bias).view(torch.float32), small).copysign_(x)


def codes_of(numbers: torch.Tensor, x: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return the codes of numbers, int32; `x` gives the sign of a small float's zero."""
    kind, bits, exponent, mantissa = schema.code_type
    sign_bit = 1 << (bits - 1)
    if kind == CodeKind.ASYM_INT:
        return numbers.int()
    if kind == CodeKind.SYM_INT:
        return numbers.int() + sign_bit
    magnitude = numbers.abs()
    if kind == CodeKind.SIGN_MAGNITUDE:
        return magnitude.int() | ((numbers < 0).int() * sign_bit)
    shift, drop = 128 - (1 << (exponent - 1)), 23 - mantissa
    threshold = 2.0 ** (shift - 126)
    subnormal = (magnitude + threshold).view(torch.int32) - ((shift + 1) << 23)
    normal = magnitude.view(torch.int32) - (shift << 23)
    return (torch.where(magnitude < threshold, subnormal, normal) >> drop) | (
        torch.signbit(x).int() * sign_bit
    )
