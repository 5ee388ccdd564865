"""The search for the least squared error by torch's operations: for CUDA, and the same bits on any device.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.humming_layout.runtime import humming
from hqconv.humming_layout.transform import humming_schema
from hqconv.quantization.cpu_groups import code_of
from hqconv.quantization.quantized import fold_sum
from hqconv.quantization.scale_candidates import CandidateScales, scales_of, tensors_of
from hqconv.quantization.scale_search import SearchResult, SearchStart, search
from hqconv.schemas.weight_schema import WeightSchema

CHUNK = 1 << 20  # weights whose errors torch works out at once, in float64
_BUILDING = threading.Lock()  # one lane builds a kernel, the others find it
CANNOT_BUILD = threading.Event()


def improved(
    stacks: Sequence[torch.Tensor],
    packed: Sequence[dict[str, torch.Tensor]],
    schema: WeightSchema,
    param_dtype: str,
    importance: torch.Tensor | None,
) -> list[dict[str, torch.Tensor]]:
    """`packed`, round-to-nearest's tensors of the stacks [E, N, K] of one expert each, with what loses least."""
    starts = [_start(s, p, schema, importance) for s, p in zip(stacks, packed, strict=True)]
    found = search(starts, schema, param_dtype)
    return [
        _replaced(stack, one, choice, schema, param_dtype)
        for stack, one, choice in zip(stacks, packed, found, strict=True)
    ]


def _start(
    stack: torch.Tensor,
    packed: dict[str, torch.Tensor],
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> SearchStart:
    weights = None if importance is None else importance.to(stack.device, non_blocking=True).double()
    scales = scales_of(packed, schema)

    def errors(tried: CandidateScales, words: torch.Tensor | None = None) -> torch.Tensor:
        def by_kernel() -> torch.Tensor | None:
            from hqconv.quantization import (
                triton_search,
                triton_sums,  # load Triton
            )

            if not triton_search.covers(stack, tried):
                return None
            table = None if words is None else triton_sums.code_values(humming_schema(schema), stack.device)
            return triton_search.errors(stack, tried, words, table, schema, weights)

        done = _built(stack, by_kernel)
        return row_errors(stack, tried, words, schema, weights) if done is None else done

    return SearchStart(scales, errors(scales, packed["weight"]), errors)


def _built(stack: torch.Tensor, launch: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """What a kernel of our own gives on a GPU; None where none can be built, or it does not cover the groups."""
    if not stack.is_cuda or CANNOT_BUILD.is_set():
        return None
    with _BUILDING:
        try:
            return launch()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever keeps Triton from building; torch gives the same bits
            CANNOT_BUILD.set()
            return None


def row_errors(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Float64 [E, N, G]: what each row of each group loses under `scales`, by torch's operations.

    `words`: packed codes to take; None: codes are chosen for the scales. `importance`: float64 [K].
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
            terms *= importance
        out[e, rows] = fold_sum(terms.view(len(values), num_groups, -1))
    return out


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
        of(scales.scale),
        of(scales.scale),
        None if zero is None else of(zero),
        None if second is None else of(second),
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


def _replaced(
    stack: torch.Tensor,
    packed: dict[str, torch.Tensor],
    found: SearchResult,
    schema: WeightSchema,
    param_dtype: str,
) -> dict[str, torch.Tensor]:
    """The tensors with what was found; groups that did not change keep their codes."""
    ops, words = humming().ops, packed["weight"]

    def by_kernel() -> torch.Tensor | None:
        from hqconv.quantization import triton_search

        if not triton_search.covers(stack, found.scales):
            return None
        return triton_search.codes(stack, found.scales, found.changed, words, schema)

    codes = _built(stack, by_kernel)
    codes = chosen_codes(stack, found.scales, found.changed, words, schema) if codes is None else codes
    weight = ops.pack_weight(codes, schema.num_bits)
    return {**packed, **tensors_of(found.scales, schema, param_dtype), "weight": weight}


def chosen_codes(
    stack: torch.Tensor,
    scales: CandidateScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
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
