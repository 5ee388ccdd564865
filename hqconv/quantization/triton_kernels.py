"""Triton kernels: error sums of stacks, errors of candidate scales, and codes for the chosen scales.

The bits are those of the CPU's compiled loops (`cpu_loops.arithmetic`, `cpu_loops.encoders`): weights are decoded in
float32, each operation is rounded once, differences are squared in float64, and terms are folded in halves, first along
a row, then over the rows. Each kernel makes one pass over the weights.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hqconv.cpu_loops import arithmetic
from hqconv.humming_layout.runtime import humming
from hqconv.quantization.quantized import code_of, fold_sum
from hqconv.quantization.scale_search import CandidateScales
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
def load_codes(words, place, is_inside, BITS: tl.constexpr):
    """Load packed codes of a row at `place`, little-endian in 32-bit words; one may straddle two of them."""
    first = place * BITS // 32
    shift = place * BITS % 32
    codes = tl.load(words + first, mask=is_inside, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    if 32 % BITS != 0:
        goes_on = is_inside & (shift + BITS > 32)
        rest = tl.load(words + first + 1, mask=goes_on, other=0).to(tl.uint32, bitcast=True)
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
def _visit(
    weights, words, table, inverse, lowest, scale, zero, second, changed, importance, out,
    num_columns, num_parts, step, part_step, num_groups, rows_per_scale, rows_per_second,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_STORED: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    IS_BFLOAT16: tl.constexpr, WRITES_CODES: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr,
):  # fmt: skip
    """Visit parts of a row, SIZE weights each: a part is a group, or every `step`-th weight of a row with one group.

    Writes the folded squares of each part, or with WRITES_CODES the codes: those of `words` where nothing `changed`.
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
        number = _scaled(number, zero, scale, group, is_part, HAS_ZERO)
        if HAS_SECOND:
            number *= tl.load(second + row // rows_per_second)
        terms = weight.to(tl.float64) - number.to(tl.float64)
        terms = terms * terms
        if IS_WEIGHTED:
            terms *= tl.load(importance + place, mask=is_inside, other=0.0)
        terms = tl.where(is_inside, terms, 0.0)
        for level in tl.static_range(NUM_LEVELS):
            terms = tl.sum(tl.reshape(terms, (WIDTH, 2, SIZE >> (level + 1))), axis=1)
        tl.store(out + row * num_parts + part, tl.reshape(terms, (WIDTH,)), mask=is_part)


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
    `importance`: float64 [K].
    """
    shape, num_groups = stack.shape, scales.scale.size(2)
    num_parts = num_groups if num_groups > 1 else cut(shape[2])[1]
    out = torch.empty(*shape[:2], num_parts, dtype=torch.float64, device=stack.device)
    _launch(stack, scales, schema, out, words=words, table=table, importance=importance)
    return out if num_groups > 1 else folded(out).unsqueeze(-1)


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
        IS_BFLOAT16=is_bfloat16,
        **_constants(schema),
        HAS_ZERO=scales.zero is not None,
        HAS_SECOND=scales.second is not None,
        IS_STORED=table is not None,
        IS_WEIGHTED=importance is not None,
        WRITES_CODES=changed is not None,
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
