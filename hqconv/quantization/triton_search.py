"""What candidate scales would lose, and the codes of those that were chosen, on CUDA: one pass over the weights each.

The same bits as `hqconv.cpu_loops.scale_search` and torch in `cuda_search`: the arithmetic is theirs, each
operation rounded once, and squares are folded in halves.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hqconv.cpu_loops import arithmetic
from hqconv.quantization.cpu_groups import code_of
from hqconv.quantization.scale_candidates import CandidateScales
from hqconv.quantization.triton_sums import cut, folded, load_codes
from hqconv.schemas.weight_schema import WeightSchema


# Headers of kernels are kept short by hand: one parameter a line would be most of them.
@triton.jit
def _round_float(x, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):
    """The nearest small float's code without its sign, ties to the truncated one, saturated; and the signed value."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LIMIT_BITS)
    threshold_bits = magnitude * 0 + ((SHIFT + 1) << 23)
    threshold = threshold_bits.to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + threshold).to(
        tl.int32, bitcast=True
    ) - threshold_bits
    scaled = tl.where(magnitude < threshold_bits, subnormal, magnitude - (SHIFT << 23))
    rounded = (scaled + ((1 << (DROP - 1)) - 1)) >> DROP
    kept = rounded << DROP
    low = (kept + threshold_bits).to(tl.float32, bitcast=True) - threshold
    high = (kept + (SHIFT << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rounded >= (1 << (23 - DROP)), high, low)
    return rounded, tl.where(bits < 0, -value, value)


@triton.jit
def _code(x, BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):  # fmt: skip # noqa: E501
    """The codes of scaled weights, and what they stand for. KIND: as in `loops`."""
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
    """Float32 of stored weights; of bfloat16 by its bits, which no conversion can flush to zero."""
    if IS_BFLOAT16:
        bits = tl.load(weights + place, mask=is_inside, other=0).to(tl.int32) << 16
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = tl.load(weights + place, mask=is_inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _scaled(values, shift, factor, group, is_part, HAS_SHIFT: tl.constexpr):
    """(values - shift) * factor, both of each part's group."""
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
    """Parts of a row, SIZE weights each: a part is a group, or of a group of the whole row every so-manieth weight.

    Writes the folded squares of each part, or with WRITES_CODES the codes: those of `words` where nothing `changed`.
    With IS_STORED the codes are those of `words`, and `table` says what they stand for.
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


def covers(stack: torch.Tensor, scales: CandidateScales) -> bool:
    """Whether groups have a size that these kernels take: what they fold at once, or a whole row."""
    groups = scales.scale.size(2)
    return groups == 1 or cut(stack.size(2) // groups)[1] == 1


def errors(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    table: torch.Tensor | None,
    schema: WeightSchema,
    importance: torch.Tensor | None,
) -> torch.Tensor:
    """Float64 [E, N, G]: what each row of each group of a stack [E, N, K] loses under `scales`.

    `words` and `table`: packed codes to take, and what codes stand for; None: codes are chosen for the scales.
    `importance`: float64 [K].
    """
    shape, num_groups = stack.shape, scales.scale.size(2)
    num_parts = num_groups if num_groups > 1 else cut(shape[2])[1]
    out = torch.empty(*shape[:2], num_parts, dtype=torch.float64, device=stack.device)
    _launch(stack, scales, schema, out, words=words, table=table, importance=importance)
    return out if num_groups > 1 else folded(out).unsqueeze(-1)


def codes(
    stack: torch.Tensor,
    scales: CandidateScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
) -> torch.Tensor:
    """Int32 [E, N, K]: the codes of groups that `changed` [E, R, G], and of the others those packed in `words`."""
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
    if num_groups > 1:
        tile = min(triton.next_power_of_2(num_groups), max(1, 4096 // size))
    parts, steps = (num_groups, (1, size)) if num_groups > 1 else (width, (width, 1))
    given = (scales.inverse(), scales.lowest(), scales.scale, scales.zero, scales.second, changed, importance)
    none, is_bfloat16 = out, stack.dtype == torch.bfloat16  # `none`: of what is not looked at
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
    """What is known of codes when the kernel is built."""
    kind, bits, exponent, mantissa = code = code_of(schema)
    limit = torch.tensor(arithmetic.largest_value(*code)).view(torch.int32).item()
    shift, drop = 128 - (1 << max(0, exponent - 1)), 23 - mantissa
    return {"BITS": bits, "KIND": kind, "LIMIT_BITS": int(limit), "SHIFT": shift, "DROP": drop}
