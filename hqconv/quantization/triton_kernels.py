"""Triton kernels: error sums of stacks, errors of candidate scales, and codes for the chosen scales.

The bits are those of the CPU's compiled loops (`cpu_loops.arithmetic`, `cpu_loops.encoders`): weights are decoded in
float32, each operation is rounded once, differences are squared in float64, and terms are folded in halves, first along
a row, then over the rows. Each kernel makes one pass over the weights.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from hqconv.cpu_loops import arithmetic
from hqconv.kernel_layout.runtime import humming
from hqconv.quantization.quantized import code_of, fold_sum
from hqconv.quantization.scale_search import CandidateScales, Ladder, byte_values, magnitude_bytes
from hqconv.schemas.weight_schema import WeightSchema

_TILE = 4096  # terms that one program folds at most
_tables: dict[tuple[str, bool, torch.device], torch.Tensor] = {}


@triton.jit
def _fold(terms, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Sum [SIZE, WIDTH] over the first dimension to [WIDTH]: its upper half onto its lower one, and so on."""
    for level in tl.static_range(NUM_LEVELS):
        terms = tl.sum(tl.reshape(terms, (2, SIZE >> (level + 1), WIDTH)), axis=0)
    return tl.reshape(terms, (WIDTH,))


@triton.jit
def _fold_rows(terms, out, num_columns, width, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Fold rows of `terms` float64 [R, num_columns] to `out` [R, width]; num_columns = SIZE * width."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, SIZE)[:, None] * width + column[None, :]
    is_inside = (column < width)[None, :] & (place < num_columns)
    values = tl.load(terms + row * num_columns + place, mask=is_inside, other=0.0)
    tl.store(out + row * width + column, _fold(values, SIZE, WIDTH, NUM_LEVELS), mask=column < width)


@triton.jit
def load_codes(words, place, is_inside, BITS: tl.constexpr, stride=1):
    """Load packed codes of a row at `place`, little-endian in 32-bit words; one may straddle two of them.

    stride: words from one of a row to its next one.
    """
    first = place * BITS // 32 * stride
    shift = place * BITS % 32
    codes = tl.load(words + first, mask=is_inside, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    if 32 % BITS != 0:
        goes_on = tl.where(is_inside, shift, 0) + BITS > 32  # so that `place` may be a scalar
        rest = tl.load(words + first + stride, mask=goes_on, other=0).to(tl.uint32, bitcast=True)
        codes = tl.where(goes_on, codes | (rest << ((32 - shift) % 32).to(tl.uint32)), codes)
    return (codes & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _sum_rows(
    weights,
    codes,
    table,
    zero,
    scale,
    scale_2,
    out,
    num_columns,
    width,
    zero_size,
    num_zeros,
    scale_size,
    num_scales,
    rows_per_scale,
    rows_per_second,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
):
    """Write a row's (w - decoded)**2 to `out` [0, row, width], w**2 to `out` [1, row, width], both folded SIZE to 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, SIZE)[:, None] * width + column[None, :]
    is_inside = (column < width)[None, :] & (place < num_columns)
    decoded = tl.load(table + load_codes(codes + row * (num_columns * BITS // 32), place, is_inside, BITS))
    if HAS_ZERO:
        decoded -= tl.load(zero + row * num_zeros + place // zero_size, mask=is_inside, other=0.0)
    if HAS_SCALE:
        group = (row // rows_per_scale) * num_scales + place // scale_size
        decoded *= tl.load(scale + group, mask=is_inside, other=0.0)
    if HAS_SECOND:
        decoded *= tl.load(scale_2 + row // rows_per_second)
    weight = tl.load(weights + row * num_columns + place, mask=is_inside, other=0.0).to(tl.float64)
    difference = tl.where(is_inside, weight - decoded.to(tl.float64), 0.0)
    at = out + row * width + column
    tl.store(at, _fold(difference * difference, SIZE, WIDTH, NUM_LEVELS), mask=column < width)
    at += tl.num_programs(0).to(tl.int64) * width
    tl.store(at, _fold(weight * weight, SIZE, WIDTH, NUM_LEVELS), mask=column < width)


def error_sums(stack: torch.Tensor, tensors: dict[str, torch.Tensor], schema: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of (w - decoded)**2 and of w**2 of each matrix, float64 [E] each.

    `stack`: [E, N, K]; `tensors`: its packed tensors of Humming's `schema`, as `QuantizedStack.tensors`. Same bits as
    `schema.dequant_tensors` and `fold_sum`; does not synchronize.
    """
    num_experts, num_rows, num_columns = stack.shape
    total = num_experts * num_rows
    scale, scale_2 = _scales(tensors, schema)
    zero = _zero_points(tensors, schema)
    none = stack.new_empty(1, dtype=torch.float32)
    size, width, tile = cut(num_columns)
    sums = torch.empty(2, total, width, dtype=torch.float64, device=stack.device)
    _sum_rows[total, triton.cdiv(width, tile)](
        stack.contiguous(),
        tensors["weight"].contiguous(),
        code_values(schema, stack.device),
        *(none if one is None else one for one in (zero, scale, scale_2)),
        sums,
        num_columns,
        width,
        *((1, 0) if zero is None else (num_columns // zero.size(-1), zero.size(-1))),
        *((1, 0) if scale is None else (num_columns // scale.size(-1), scale.size(-1))),
        1 if scale is None else num_rows // scale.size(-2),
        1 if scale_2 is None else total // scale_2.numel(),
        BITS=schema.b_dtype.num_bits,
        HAS_ZERO=zero is not None,
        HAS_SCALE=scale is not None,
        HAS_SECOND=scale_2 is not None,
        SIZE=size,
        WIDTH=tile,
        NUM_LEVELS=size.bit_length() - 1,
        enable_fp_fusion=False,  # or the GPU would round a product and a sum at once, and the CPU twice
    )
    error, power = folded(folded(sums).view(2, num_experts, num_rows))
    return error, power


def cut(length: int) -> tuple[int, int, int]:
    """Factor `length` as size * width, with a power of two `size`; return also the width of one program's tile."""
    size = min(length & -length, _TILE)
    width = length // size
    return size, width, min(triton.next_power_of_2(width), max(1, _TILE // size))


def folded(terms: torch.Tensor) -> torch.Tensor:
    """Fold float64 [..., L] over L: the power of two in L by a kernel, the remaining factor by torch."""
    if terms.size(-1) > 1 and terms.size(-1) % 2 == 0:
        size, width, tile = cut(terms.size(-1))
        flat = terms.contiguous().view(-1, terms.size(-1))
        out = flat.new_empty(len(flat), width)
        levels = size.bit_length() - 1
        _fold_rows[len(flat), triton.cdiv(width, tile)](
            flat, out, flat.size(1), width, SIZE=size, WIDTH=tile, NUM_LEVELS=levels
        )
        terms = out.view(*terms.shape[:-1], width)
    return fold_sum(terms)


def _scales(tensors: dict[str, torch.Tensor], schema: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales float32 [E, N | N / bn, G], and the second scales float32; None where there are none."""
    scale, scale_2 = tensors["weight_scale"], tensors.get("weight_scale_2")
    if str(schema.weight_scale_type) == "tensor" or scale.ndim == 1:
        return None, scale.float().contiguous()
    if str(schema.bs_dtype) == "float8e5m3":
        scale = humming().ops.dequant_weight(scale.to(torch.int32).contiguous(), 5, 3, False)
    return scale.float().contiguous(), None if scale_2 is None else scale_2.float().contiguous()


def _zero_points(tensors: dict[str, torch.Tensor], schema: Any) -> torch.Tensor | None:
    """Return the zero points float32 [E, N, G]; None where there are none."""
    zero = tensors.get("zero_point")
    if zero is None:
        return None
    if zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        zero = humming().ops.unpack_weight(columns, schema.b_dtype.num_bits).transpose(-1, -2)
    return zero.float().contiguous()


def code_values(schema: Any, device: torch.device) -> torch.Tensor:
    """Return the value of every code before zero point and scale, float32 [2**bits]; cached for each device."""
    key = (str(schema.b_dtype), bool(schema.has_zero_point), device)
    if key not in _tables:
        _tables[key] = _make_table(schema, device)
        if device.type == "cuda":  # other streams will read the table
            torch.cuda.current_stream(device).synchronize()
    return _tables[key]


def _make_table(schema: Any, device: torch.device) -> torch.Tensor:
    dtype = schema.b_dtype
    codes = torch.arange(1 << dtype.num_bits, dtype=torch.int32, device=device)
    if dtype.is_integer_type:
        middle = 0 if schema.has_zero_point else 1 << (dtype.num_bits - 1)
        return codes.float() - middle
    values: torch.Tensor = humming().ops.dequant_weight(codes, dtype.exponent_bits, dtype.mantissa_bits, True)
    return values


# Headers of kernels are kept short by hand: one parameter a line would be most of them.
@triton.jit
def _round_float(x, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):
    """Round to the nearest small float, ties to the truncated one, saturated; return unsigned code and signed value."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LIMIT_BITS)
    threshold_bits = magnitude * 0 + ((SHIFT + 1) << 23)
    threshold = threshold_bits.to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + threshold).to(tl.int32, bitcast=True) - threshold_bits
    scaled = tl.where(magnitude < threshold_bits, subnormal, magnitude - (SHIFT << 23))
    rounded = (scaled + ((1 << (DROP - 1)) - 1)) >> DROP
    kept = rounded << DROP
    low = (kept + threshold_bits).to(tl.float32, bitcast=True) - threshold
    high = (kept + (SHIFT << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rounded >= (1 << (23 - DROP)), high, low)
    return rounded, tl.where(bits < 0, -value, value)


@triton.jit
def _code(x, BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):  # fmt: skip # noqa: E501
    """Round scaled weights to codes; return codes and their values. KIND: as in `cpu_loops.arithmetic`."""
    if KIND == 0:
        codes, number = _round_float(x, LIMIT_BITS, SHIFT, DROP)
        codes |= (x.to(tl.int32, bitcast=True) >> (32 - BITS)) & (1 << (BITS - 1))
    else:  # to the nearest integer, ties to even: between 2**23 and 2**24 there are no other numbers
        highest = (1 << BITS) - 1 if KIND == 2 else (1 << (BITS - 1)) - 1
        least = 0 if KIND == 2 else (-(1 << (BITS - 1)) if KIND == 1 else -highest)
        number = (tl.minimum(tl.maximum(x, least * 1.0), highest * 1.0) + 12582912.0) - 12582912.0
        codes = number.to(tl.int32)
        if KIND == 1:
            codes += 1 << (BITS - 1)
        if KIND == 3:
            codes = tl.where(codes < 0, -codes | (1 << (BITS - 1)), codes)
    return codes, number


@triton.jit
def _load_weights(weights, place, is_inside, IS_BFLOAT16: tl.constexpr):
    """Load stored weights as float32; bfloat16 by its bits, as a conversion could flush subnormals to zero."""
    if IS_BFLOAT16:
        bits = tl.load(weights + place, mask=is_inside, other=0).to(tl.int32) << 16
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = tl.load(weights + place, mask=is_inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _scaled(values, shift, factor, group, is_part, HAS_SHIFT: tl.constexpr):
    """Compute (values - shift) * factor, both of each part's group."""
    if HAS_SHIFT:
        values = values - tl.load(shift + group, mask=is_part, other=0.0)[:, None]
    return values * tl.load(factor + group, mask=is_part, other=0.0)[:, None]


@triton.jit
def _fold_groups(terms, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Sum [WIDTH, SIZE] over the second dimension to [WIDTH], as `_fold`."""
    for level in tl.static_range(NUM_LEVELS):
        terms = tl.sum(tl.reshape(terms, (WIDTH, 2, SIZE >> (level + 1))), axis=1)
    return tl.reshape(terms, (WIDTH,))


@triton.jit
def _visit(
    weights, words, table, inverse, lowest, scale, zero, second, changed, importance, out,
    num_columns, num_parts, step, part_step, num_groups, rows_per_scale, rows_per_second, rows_per_importance,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_STORED: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    IS_BFLOAT16: tl.constexpr, WRITES_CODES: tl.constexpr, WRITES_FIT: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr,
):  # fmt: skip
    """Visit parts of a row, SIZE weights each: a part is a group, or every `step`-th weight of a row with one group.

    Writes the folded squares of each part, or with WRITES_CODES the codes: those of `words` where nothing `changed`.
    With WRITES_FIT the folded products of weights and numbers, then the folded squares of the numbers.
    With IS_STORED the codes are those of `words`, and `table` holds their values.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place, is_part = part[:, None] * part_step + tl.arange(0, SIZE)[None, :] * step, part < num_parts
    is_inside = is_part[:, None] & (place < num_columns)
    group = (row // rows_per_scale) * num_groups + tl.minimum(part, num_groups - 1)
    weight = _load_weights(weights + row * num_columns, place, is_inside, IS_BFLOAT16)
    if IS_STORED or WRITES_CODES:
        kept = load_codes(words + row * (num_columns * BITS // 32), place, is_inside, BITS)
    if IS_STORED:
        number = tl.load(table + kept)
    else:
        x = _scaled(weight, lowest, inverse, group, is_part, HAS_ZERO)
        codes, number = _code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
    if WRITES_CODES:
        is_new = tl.load(changed + group, mask=is_part, other=0)[:, None] != 0
        tl.store(out + row * num_columns + place, tl.where(is_new, codes, kept), mask=is_inside)
    else:
        weight_of = 1.0
        if IS_WEIGHTED:
            columns = importance + (row // rows_per_importance) * num_columns + place
            weight_of = tl.load(columns, mask=is_inside, other=0.0)
        if WRITES_FIT:
            if HAS_ZERO:
                number = number - tl.load(zero + group, mask=is_part, other=0.0)[:, None]
            value = number.to(tl.float64)
            squares = value * value
            terms = weight.to(tl.float64) * value
            if IS_WEIGHTED:
                squares *= weight_of
            squares = _fold_groups(tl.where(is_inside, squares, 0.0), SIZE, WIDTH, NUM_LEVELS)
            at = out + (tl.num_programs(0).to(tl.int64) + row) * num_parts + part
            tl.store(at, squares, mask=is_part)
        else:
            number = _scaled(number, zero, scale, group, is_part, HAS_ZERO)
            if HAS_SECOND:
                number *= tl.load(second + row // rows_per_second)
            terms = weight.to(tl.float64) - number.to(tl.float64)
            terms = terms * terms
        if IS_WEIGHTED:
            terms *= weight_of
        terms = _fold_groups(tl.where(is_inside, terms, 0.0), SIZE, WIDTH, NUM_LEVELS)
        tl.store(out + row * num_parts + part, terms, mask=is_part)


def row_errors(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    table: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Return the squared error of each row's part of each group of a stack [E, N, K], float64 [E, N, G].

    `words` and `table`: packed codes and `code_values`; None to choose codes for the scales.
    `importance`: float64 [1 or E, K].
    """
    out = _parts(stack, scales)
    _launch(stack, scales, schema, out, words=words, table=table, importance=importance)
    return out if scales.scale.size(2) > 1 else folded(out).unsqueeze(-1)


def row_fits(
    stack: torch.Tensor, scales: CandidateScales, schema: WeightSchema, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of w * v and of v * v of each row and group, float64 [E, N, G] each.

    v: what the code that a weight w gets under `scales` stands for, less the zero point. importance: as `row_errors`.
    """
    out = torch.stack([_parts(stack, scales)] * 2)
    _launch(stack, scales, schema, out, importance=importance, writes_fit=True)
    products, squares = out if scales.scale.size(2) > 1 else folded(out).unsqueeze(-1)
    return products, squares


def _parts(stack: torch.Tensor, scales: CandidateScales) -> torch.Tensor:
    """Return an uninitialized sum for each part that `_visit` folds, float64 [E, N, parts]."""
    num_groups = scales.scale.size(2)
    num_parts = num_groups if num_groups > 1 else cut(stack.size(2))[1]
    return torch.empty(*stack.shape[:2], num_parts, dtype=torch.float64, device=stack.device)


def chosen_codes(
    stack: torch.Tensor, scales: CandidateScales, changed: torch.Tensor, words: torch.Tensor, schema: WeightSchema
) -> torch.Tensor:
    """Return codes int32 [E, N, K]: new ones in groups that `changed` [E, R, G], else those packed in `words`."""
    out = torch.empty(stack.shape, dtype=torch.int32, device=stack.device)
    _launch(stack, scales, schema, out, words=words, changed=changed.to(torch.int8))
    return out


def _launch(
    stack: torch.Tensor,
    scales: CandidateScales,
    schema: WeightSchema,
    out: torch.Tensor,
    *,
    words: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    changed: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    writes_fit: bool = False,
) -> None:
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups = num_experts * num_rows, scales.scale.size(2)
    size, width, tile = cut(num_columns // num_groups)
    if num_groups > 1:  # one program folds whole groups, whose size is a power of two
        size = num_columns // num_groups
        tile = min(triton.next_power_of_2(num_groups), max(1, 4096 // size))
    parts, steps = (num_groups, (1, size)) if num_groups > 1 else (width, (width, 1))
    given = (scales.inverse(), scales.lowest(), scales.scale, scales.zero, scales.second, changed, importance)
    none, is_bfloat16 = out, stack.dtype == torch.bfloat16  # `none`: for unused pointers
    _visit[total, triton.cdiv(parts, tile)](
        stack.contiguous().view(torch.int16) if is_bfloat16 else stack.contiguous(),
        none if words is None else words.contiguous(),
        none if table is None else table,
        *(none if one is None else one.contiguous() for one in given),
        out,
        num_columns,
        parts,
        *steps,
        num_groups,
        num_rows // scales.scale.size(1),
        1 if scales.second is None else total // scales.second.numel(),
        1 if importance is None else total // len(importance),
        IS_BFLOAT16=is_bfloat16,
        **_constants(schema),
        HAS_ZERO=scales.zero is not None,
        HAS_SECOND=scales.second is not None,
        IS_STORED=table is not None,
        IS_WEIGHTED=importance is not None,
        WRITES_CODES=changed is not None,
        WRITES_FIT=writes_fit,
        SIZE=size,
        WIDTH=tile,
        NUM_LEVELS=size.bit_length() - 1,
        enable_fp_fusion=False,  # or the GPU would round a product and a sum at once, and the CPU twice
    )


def _constants(schema: WeightSchema) -> dict[str, int]:
    """Return the constants of the code type for the kernel."""
    kind, bits, exponent, mantissa = code = code_of(schema)
    limit = torch.tensor(arithmetic.largest_value(*code)).view(torch.int32).item()
    shift, drop = 128 - (1 << max(0, exponent - 1)), 23 - mantissa
    return {"BITS": bits, "KIND": kind, "LIMIT_BITS": int(limit), "SHIFT": shift, "DROP": drop}


@triton.jit
def _step_scale(
    step, stored, byte, floor, values, factors, num_down, top, HAS_BYTES: tl.constexpr, NUM_DROPPED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Return the scales of a step; 0 where there is none. NUM_DROPPED: low bits of float32 that are rounded away."""
    if HAS_BYTES:
        moved = byte + step - (step > 0).to(tl.int32)
        exists = (moved >= tl.maximum(floor, 1)) & (moved <= top) & (byte <= top)
        scale = tl.load(values + moved, mask=exists, other=0.0)
        scale = tl.where(stored < 0, -scale, scale)
    else:
        scale = stored * tl.load(factors + (step + num_down))
        if NUM_DROPPED > 0:
            bits = scale.to(tl.int32, bitcast=True)
            bits += (1 << (NUM_DROPPED - 1)) - 1 + ((bits >> NUM_DROPPED) & 1)
            scale = ((bits >> NUM_DROPPED) << NUM_DROPPED).to(tl.float32, bitcast=True)
        is_usable = (tl.abs(scale) >= LEAST) & (tl.abs(scale) <= MOST)
        scale = tl.where(is_usable, scale, 0.0)
    return scale


@triton.jit
def _group_terms(weight, number, scale, second, importance, is_inside, HAS_SECOND: tl.constexpr, IS_WEIGHTED: tl.constexpr):  # fmt: skip # noqa: E501
    """Return the weighted squared errors of decoded numbers, float64 [WIDTH, SIZE]."""
    number = number * scale[:, None]
    if HAS_SECOND:
        number *= second
    terms = weight.to(tl.float64) - number.to(tl.float64)
    terms = terms * terms
    if IS_WEIGHTED:
        terms *= importance
    return tl.where(is_inside, terms, 0.0)


@triton.jit
def _sweep(
    weights, stored_scales, bytes_of, floors, values, factors, second, importance, error, steps,
    num_columns, num_groups, rows_per_expert, rows_per_second, rows_per_importance,
    limit, num_up, num_down, top, no_half,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FIRST: tl.constexpr, HAS_BYTES: tl.constexpr, HAS_FLOOR: tl.constexpr,
    NUM_DROPPED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, HAS_SECOND: tl.constexpr,
    IS_WEIGHTED: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr,
):  # fmt: skip
    """Sweep the scales of groups in a row, as `cpu_loops.scale_loops.Searcher`; update `error` and write `steps`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_part = part < num_groups
    place = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    is_inside = is_part[:, None] & (place < num_columns)
    weight = _load_weights(weights + row * num_columns, place, is_inside, IS_BFLOAT16)
    group = row * num_groups + part
    stored = tl.load(stored_scales + group, mask=is_part, other=0.0)
    least = tl.load(error + group, mask=is_part, other=0.0)
    byte, floor = part * 0, part * 0
    if HAS_BYTES:
        byte = tl.load(bytes_of + group, mask=is_part, other=0)
    if HAS_FLOOR:
        floor += tl.load(floors + row // rows_per_expert)
    second_scale, importance_of = 1.0, 1.0
    if HAS_SECOND:
        second_scale = tl.load(second + row // rows_per_second)
    if IS_WEIGHTED:
        columns = importance + (row // rows_per_importance) * num_columns + place
        importance_of = tl.load(columns, mask=is_inside, other=0.0)
    end = tl.maximum(tl.max(tl.abs(weight), axis=1), 1e-30) * limit
    best = part * 0
    is_known = is_part & (tl.abs(stored) < float("inf"))

    step, active = tl.program_id(0) * 0 + FIRST, is_known
    going = tl.max(active.to(tl.int32), axis=0)
    while (going > 0) & (step <= num_up):
        scale = _step_scale(
            step, stored, byte, floor, values, factors, num_down, top, HAS_BYTES, NUM_DROPPED, LEAST, MOST
        )
        both = scale * second_scale if HAS_SECOND else scale
        is_tried = (tl.abs(both) < end) | (step <= 1)
        if HAS_BYTES:
            is_tried = is_tried | (byte + step - 1 < no_half)
        active = active & is_tried
        exists = active & (scale != 0.0)
        inverse = tl.div_rn(both * 0.0 + 1.0, tl.where(exists, both, 1.0))
        _, number = _code(weight * inverse[:, None], BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        terms = _group_terms(weight, number, scale, second_scale, importance_of, is_inside, HAS_SECOND, IS_WEIGHTED)
        loss = _fold_groups(terms, SIZE, WIDTH, NUM_LEVELS)
        wins = exists & (loss < least)
        best, least = tl.where(wins, step, best), tl.where(wins, loss, least)
        step += 1
        going = tl.max(active.to(tl.int32), axis=0)

    step, active = tl.program_id(0) * 0 - 1, is_known
    going = tl.max(active.to(tl.int32), axis=0)
    while (going > 0) & (step >= -num_down):
        scale = _step_scale(
            step, stored, byte, floor, values, factors, num_down, top, HAS_BYTES, NUM_DROPPED, LEAST, MOST
        )
        both = scale * second_scale if HAS_SECOND else scale
        active = active & (scale != 0.0)
        inverse = tl.div_rn(both * 0.0 + 1.0, tl.where(active, both, 1.0))
        x = weight * inverse[:, None]
        _, number = _code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        terms = _group_terms(weight, number, scale, second_scale, importance_of, is_inside, HAS_SECOND, IS_WEIGHTED)
        is_beyond = (x > HIGHEST) | (x < LOWEST)
        clipped = _fold_groups(tl.where(is_beyond, terms, 0.0), SIZE, WIDTH, NUM_LEVELS)
        active = active & (clipped < least)
        loss = _fold_groups(terms, SIZE, WIDTH, NUM_LEVELS)
        wins = active & (loss < least)
        best, least = tl.where(wins, step, best), tl.where(wins, loss, least)
        step -= 1
        going = tl.max(active.to(tl.int32), axis=0)

    tl.store(error + group, least, mask=is_part)
    tl.store(steps + group, best, mask=is_part)


def can_sweep(schema: WeightSchema) -> bool:
    """Return whether `sweep` takes the schema's groups: one tile holds whole groups."""
    return schema.weight_scale_type == "group" and schema.weight_scale_group_size <= _SWEPT


_SWEPT = 1024  # weights in a tile of `sweep`
_RANGES = {  # of stored scales: low bits of float32 that are rounded away, the least and the largest magnitude
    torch.bfloat16: (16, 2.0**-126, 3.4e38),
    torch.float16: (13, 2.0**-14, 65504.0),
}


def sweep(
    stack: torch.Tensor,
    start: CandidateScales,
    least: torch.Tensor,
    ladder: Ladder,
    floor: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the steps of the best group scales and their errors, as `scale_search.sweep_each`; see `can_sweep`.

    importance: as `row_errors`. Steps that cannot win are left out.
    """
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups, size = num_experts * num_rows, start.scale.size(2), schema.weight_scale_group_size
    is_bfloat16, device = stack.dtype == torch.bfloat16, stack.device
    error, steps = least.clone().contiguous(), torch.empty(least.shape, dtype=torch.int32, device=device)
    tile = min(triton.next_power_of_2(num_groups), max(1, _SWEPT // size))
    code = code_of(schema)
    highest = arithmetic.largest_value(*code)
    lowest = -highest - 1 if code[0] == arithmetic.SYM_INT else -highest
    dropped, lowest_scale, highest_scale = _RANGES.get(start.stored.dtype, (0, 2.0**-126, 3.4e38))
    scale_bytes = magnitude_bytes(start.stored).contiguous() if ladder.has_bytes else steps
    _sweep[total, triton.cdiv(num_groups, tile)](
        stack.contiguous().view(torch.int16) if is_bfloat16 else stack.contiguous(),
        start.scale.contiguous(),
        scale_bytes,
        steps if floor is None else floor.to(torch.int32).contiguous(),
        _on(byte_values(start.stored.dtype), device) if ladder.has_bytes else error,
        error if ladder.has_bytes else _factors(ladder.factors(), device),
        error if start.second is None else start.second.contiguous(),
        error if importance is None else importance.contiguous(),
        error,
        steps,
        num_columns,
        num_groups,
        num_rows,
        1 if start.second is None else total // start.second.numel(),
        1 if importance is None else total // len(importance),
        ladder.limit,
        ladder.num_up,
        ladder.num_down,
        ladder.top,
        ladder.no_half,
        **_constants(schema),
        LOWEST=float(lowest),
        HIGHEST=float(highest),
        FIRST=ladder.first,
        HAS_BYTES=ladder.has_bytes,
        HAS_FLOOR=floor is not None,
        NUM_DROPPED=dropped,
        LEAST=lowest_scale,
        MOST=highest_scale,
        HAS_SECOND=start.second is not None,
        IS_WEIGHTED=importance is not None,
        IS_BFLOAT16=is_bfloat16,
        SIZE=size,
        WIDTH=tile,
        NUM_LEVELS=size.bit_length() - 1,
        enable_fp_fusion=False,
    )
    return steps, error


@functools.cache
def _factors(factors: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return _on(torch.tensor(factors, dtype=torch.float32), device)


@functools.cache
def _on(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a table to a device, once; other streams will read it."""
    copied = values.to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copied
