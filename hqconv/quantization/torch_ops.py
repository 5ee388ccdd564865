"""Error sums, least-squares fits, codes and scale sweeps of stacks, by torch's operations: the implementation for GPUs.

The bits are those of the CPU's compiled loops: weights are decoded in float32, each operation is rounded once,
differences are squared in float64, and terms are folded in halves (`fold_sum`). Chunks of rows bound the memory.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, S columns of a group, C rows of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.kernel_layout.runtime import humming
from hqconv.quantization.quantized import code_of, fold_sum
from hqconv.quantization.scale_search import CandidateScales, Ladder, magnitude_bytes, scales_of, stepped
from hqconv.schemas.weight_schema import WeightSchema

_CUDA_WEIGHTS, _CPU_WEIGHTS = 1 << 24, 1 << 18  # of a chunk; each has some 60 bytes of temporary tensors


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows of a stack: float32 weights [C, G, S], their scales [C, G], second scales [C, 1], and importance.

    rows: positions among all rows of the stack. importance: float64, broadcast to [C, G, S]; None for 1.
    """

    rows: slice
    weights: torch.Tensor
    scales: CandidateScales
    importance: torch.Tensor | None


def _chunks(stack: torch.Tensor, scales: CandidateScales, importance: torch.Tensor | None = None) -> Iterator[_Chunk]:
    """Yield a stack in chunks. importance: float64 [1 or E, K]."""
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups = num_experts * num_rows, scales.scale.size(2)
    size = max(1, (_CUDA_WEIGHTS if stack.is_cuda else _CPU_WEIGHTS) // num_columns)
    flat = stack.reshape(total, num_columns)
    for begin in range(0, total, size):
        rows = slice(begin, min(begin + size, total))
        of_columns = None
        if importance is not None:
            of_columns = _of_rows(importance, rows, total).view(-1, num_groups, num_columns // num_groups)
        second = None if scales.second is None else _of_rows(scales.second.reshape(-1, 1), rows, total)
        of_rows = CandidateScales(
            _of_rows(scales.stored.flatten(0, 1), rows, total),
            _of_rows(scales.scale.flatten(0, 1), rows, total),
            None if scales.zero is None else _of_rows(scales.zero.flatten(0, 1), rows, total),
            second,
        )
        yield _Chunk(rows, flat[rows].float().view(-1, num_groups, num_columns // num_groups), of_rows, of_columns)


def _of_rows(values: torch.Tensor, rows: slice, total: int) -> torch.Tensor:
    """Return the values of some of `total` rows, from [X, …] that each hold for total / X rows in turn."""
    per_value = total // len(values)
    if per_value == 1:
        return values[rows]
    if len(values) == 1:
        return values.expand(rows.stop - rows.start, *values.shape[1:])
    first, last = rows.start // per_value, (rows.stop - 1) // per_value + 1
    bits = values[first:last].view(torch.uint8) if values.element_size() == 1 else values[first:last]
    each = bits.unsqueeze(1).expand(-1, per_value, *bits.shape[1:]).flatten(0, 1)
    return each[rows.start - first * per_value : rows.stop - first * per_value].view(values.dtype)


def error_sums(
    stack: torch.Tensor, tensors: dict[str, torch.Tensor], schema: WeightSchema, num_exact: torch.Tensor | None = None
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
        difference = _differences(chunk, chunk.scales, _stored_numbers(words[chunk.rows], chunk, schema))
        if num_exact is not None:
            exact[chunk.rows] = (difference == 0).all(-1).sum(-1)
        for number, terms in enumerate((difference, chunk.weights.double())):
            sums[number, chunk.rows] = fold_sum(terms.square_().flatten(1))
    if num_exact is not None:
        num_exact.copy_(exact.view(num_experts, num_rows).sum(1))
    error, power = fold_sum(sums.view(2, num_experts, num_rows))
    return error, power


def row_errors(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Return the squared error of each row's part of each group of a stack [E, N, K], float64 [E, N, G].

    words: packed codes; None to choose codes for the scales. importance: float64 [1 or E, K].
    """
    out = torch.empty(*stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device)
    for chunk in _chunks(stack, scales, importance):
        if words is None:
            numbers, _ = _nearest_numbers(chunk, chunk.scales, schema)
        else:
            numbers = _stored_numbers(words.flatten(0, 1)[chunk.rows], chunk, schema)
        terms = _weighted(_differences(chunk, chunk.scales, numbers).square_(), chunk)
        out.flatten(0, 1)[chunk.rows] = fold_sum(terms)
    return out


def row_fits(
    stack: torch.Tensor, scales: CandidateScales, schema: WeightSchema, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of w * v and of v * v of each row and group, float64 [E, N, G] each.

    v: the number of the code that a weight w gets under `scales`, less the zero point. importance: as `row_errors`.
    """
    out = torch.empty(2, *stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device)
    for chunk in _chunks(stack, scales, importance):
        numbers, _ = _nearest_numbers(chunk, chunk.scales, schema)
        if chunk.scales.zero is not None:
            numbers = numbers - chunk.scales.zero.unsqueeze(-1)
        values = numbers.double()
        for number, terms in enumerate((values * chunk.weights, values * values)):
            out[number].flatten(0, 1)[chunk.rows] = fold_sum(_weighted(terms, chunk))
    return out[0], out[1]


def chosen_codes(
    stack: torch.Tensor, scales: CandidateScales, changed: torch.Tensor, words: torch.Tensor, schema: WeightSchema
) -> torch.Tensor:
    """Return packed codes int32 [E, N, K * bits / 32]: new ones in groups that `changed` [E, R, G], else `words`."""
    out, total = torch.empty_like(words), stack.size(0) * stack.size(1)
    for chunk in _chunks(stack, scales):
        kept = humming().ops.unpack_weight(words.flatten(0, 1)[chunk.rows].contiguous(), schema.num_bits)
        numbers, x = _nearest_numbers(chunk, chunk.scales, schema)
        is_new = _of_rows(changed.flatten(0, 1), chunk.rows, total).unsqueeze(-1)
        codes = torch.where(is_new, _codes(numbers, x, schema), kept.view(numbers.shape)).flatten(1)
        out.flatten(0, 1)[chunk.rows] = humming().ops.pack_weight(codes, schema.num_bits)
    return out


def sweep(
    stack: torch.Tensor,
    start: CandidateScales,
    least: torch.Tensor,
    ladder: Ladder,
    floor: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the steps of the best scales of rows and their errors, as `scale_search.sweep_each`.

    importance: as `row_errors`. Steps that cannot win are left out; waits for the device after each step.
    """
    steps, error = torch.zeros(least.shape, dtype=torch.int32, device=least.device), least.clone()
    total = stack.size(0) * stack.size(1)
    for chunk in _chunks(stack, start, importance):
        floor_of_rows = None if floor is None else _of_rows(floor.view(-1, 1), chunk.rows, total)
        best, found = _swept(chunk, error.flatten(0, 1)[chunk.rows], ladder, floor_of_rows, schema)
        steps.flatten(0, 1)[chunk.rows], error.flatten(0, 1)[chunk.rows] = best, found
    return steps, error


def _swept(
    chunk: _Chunk, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best steps and errors of a chunk, [C, G]."""
    code, start = code_of(schema), chunk.scales
    highest = arithmetic.largest_value(*code)
    lowest = -highest - 1 if code[0] == arithmetic.SYM_INT else -highest
    end = chunk.weights.abs().amax(-1).clamp_min(1e-30) * ladder.limit
    best, is_known = torch.zeros(least.shape, dtype=torch.int32, device=least.device), torch.isfinite(start.scale)
    for steps in (range(ladder.first, ladder.num_up + 1), range(-1, -ladder.num_down - 1, -1)):
        active = is_known
        for step in steps:
            tried, exists = stepped(start, torch.full_like(best, step), ladder)
            if floor is not None:
                exists = exists & (magnitude_bytes(tried.stored) >= floor)
            if step > 1:
                size = tried.scale.abs() if tried.second is None else (tried.scale * tried.second).abs()
                is_small = size < end
                if ladder.has_bytes:
                    is_small |= magnitude_bytes(start.stored) + step - 1 < ladder.no_half
                active = active & is_small
            if step < 0:
                active = active & exists
            if not bool(active.any()):
                break
            numbers, x = _nearest_numbers(chunk, tried, schema)
            terms = _weighted(_differences(chunk, tried, numbers).square_(), chunk)
            if step < 0:  # smaller scales lose more beyond the largest code
                is_beyond = (x > highest) | (x < lowest)
                active = active & (fold_sum(torch.where(is_beyond, terms, 0.0)) < least)
            loss = fold_sum(terms)
            wins = active & exists & (loss < least)
            best, least = torch.where(wins, step, best), torch.where(wins, loss, least)
    return best, least


def _weighted(terms: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    return terms if chunk.importance is None else terms.mul_(chunk.importance)


def _differences(chunk: _Chunk, scales: CandidateScales, numbers: torch.Tensor) -> torch.Tensor:
    """Return weights less the decoded ones, float64 [C, G, S]; every product is rounded once in float32."""
    if scales.zero is not None:
        numbers = numbers - scales.zero.unsqueeze(-1)
    decoded = numbers * scales.scale.unsqueeze(-1)
    if scales.second is not None:
        decoded *= scales.second.unsqueeze(-1)
    return chunk.weights.double().sub_(decoded)


def _stored_numbers(words: torch.Tensor, chunk: _Chunk, schema: WeightSchema) -> torch.Tensor:
    """Return the numbers of packed codes, before zero point and scale, float32 [C, G, S]."""
    kind, bits, exponent, mantissa = code_of(schema)
    codes = humming().ops.unpack_weight(words.contiguous(), bits)
    if kind == arithmetic.ASYM_INT:
        numbers = codes.float()
    elif kind == arithmetic.SYM_INT:
        numbers = codes.sub_(1 << (bits - 1)).float()
    else:
        numbers = humming().ops.dequant_weight(codes, exponent, mantissa, True)
    return numbers.view(chunk.weights.shape)


def _nearest_numbers(chunk: _Chunk, scales: CandidateScales, schema: WeightSchema) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the codes that weights get, before zero point and scale, and the scaled weights."""
    kind, bits, exponent, mantissa = code = code_of(schema)
    lowest, weights = scales.lowest(), chunk.weights
    x = (weights if lowest is None else weights - lowest.unsqueeze(-1)) * scales.inverse().unsqueeze(-1)
    if kind == arithmetic.FLOAT:
        return _round_float(x, exponent, mantissa, arithmetic.largest_value(*code)), x
    highest = float(2**bits - 1 if kind == arithmetic.ASYM_INT else 2 ** (bits - 1) - 1)
    least = {arithmetic.ASYM_INT: 0.0, arithmetic.SYM_INT: -highest - 1}.get(kind, -highest)
    return torch.round(x).clamp_(least, highest), x


def _round_float(x: torch.Tensor, exponent: int, mantissa: int, largest: float) -> torch.Tensor:
    """Return the nearest small float, ties to the truncated one, saturated: as `cpu_loops.encoders`."""
    shift, drop = 128 - (1 << (exponent - 1)), 23 - mantissa
    bias, threshold_bits, threshold = shift << 23, (shift + 1) << 23, 2.0 ** (shift - 126)
    magnitude = x.abs().clamp_(max=largest)
    bits = magnitude.view(torch.int32)
    subnormal = (magnitude + threshold).view(torch.int32).sub_(threshold_bits)
    scaled = torch.where(bits < threshold_bits, subnormal, bits - bias)
    kept = ((scaled + ((1 << (drop - 1)) - 1)) >> drop) << drop
    small = (kept + threshold_bits).view(torch.float32).sub_(threshold)
    is_normal = kept >= 1 << (mantissa + drop)
    return torch.where(is_normal, (kept + bias).view(torch.float32), small).copysign_(x)


def _codes(numbers: torch.Tensor, x: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return the codes of numbers, int32; `x` gives the sign of a small float's zero."""
    kind, bits, exponent, mantissa = code_of(schema)
    sign_bit = 1 << (bits - 1)
    if kind == arithmetic.ASYM_INT:
        return numbers.int()
    if kind == arithmetic.SYM_INT:
        return numbers.int() + sign_bit
    magnitude = numbers.abs()
    if kind == arithmetic.SIGN_MAGNITUDE:
        return magnitude.int() | ((numbers < 0).int() * sign_bit)
    shift, drop = 128 - (1 << (exponent - 1)), 23 - mantissa
    threshold = 2.0 ** (shift - 126)
    subnormal = (magnitude + threshold).view(torch.int32) - ((shift + 1) << 23)
    normal = magnitude.view(torch.int32) - (shift << 23)
    return (torch.where(magnitude < threshold, subnormal, normal) >> drop) | (torch.signbit(x).int() * sign_bit)
