"""Triton kernel of error compensation: losses of candidate scales, and the codes for the chosen ones.

The bits are those of the CPU's loops (`cpu_loops.compensation`): columns one after the other, corrections in float64,
every operation rounded once.

Each thread has rows of its own, and threads exchange nothing. In memory the rows are the last dimension of all tensors,
so that neighboring threads read neighboring bytes. A tile is rounded in blocks of 16 columns, whose corrections
[BLOCK, ROWS] are in registers. First a block is corrected for the columns of the blocks before, in their order; their
errors are in a scratch buffer, float64 [programs, WIDTH, ROWS]. Then its own columns are rounded one after the other,
by unrolled code. So every sum has its terms in the order of the CPU's loops. The number of programs, and so the scratch
buffer, is bounded: each visits several tiles.

Legend: E experts, N output rows, K input columns, G groups along K, T tiles along K, W columns of a tile, U units of
decision along K.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from hqconv.quantization.coded_matrix import code_table
from hqconv.quantization.gptq import inverse_of
from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.quantized import TileFactors
from hqconv.quantization.triton_sweep import _code, _constants, _load_weights, _on
from hqconv.schemas.weight_schema import WeightSchema

_BLOCK = 16  # columns whose corrections are in registers
_ROWS = 128  # of a program
_WARPS, _STORED_WARPS = 2, 4  # two rows for each thread, which loads factors once for both; or one, for stored codes
_PROGRAMS = 792  # with a scratch buffer: six for each of 132 multiprocessors; of wide tiles 99 MiB


@functools.cache
def _code_values(b_dtype: str, is_symmetric: bool, device: torch.device) -> torch.Tensor:
    return _on(torch.from_numpy(code_table(b_dtype, is_symmetric).copy()), device)


def code_values(schema: WeightSchema, device: torch.device) -> torch.Tensor:
    """Return the value of every code before zero point and scale, float32 [2**bits]; cached for each device."""
    return _code_values(schema.b_dtype, not schema.has_zero_point, device)


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
def _pick(values, place, j):
    """Return row j of values [BLOCK, ROWS], with 0, 1 … in `place`; for a constant j one register of each thread."""
    return tl.sum(tl.where(place[:, None] == j, values, 0.0), axis=0)


@triton.jit
def _carried(errors, ahead, first, lane, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the corrections of a block for the errors of the `first` columns of its tile, float64 [BLOCK, ROWS].

    ahead: pointers to the block's columns in the first row of the tile's feedback.
    """
    correction = tl.zeros((BLOCK, ROWS), tl.float64)
    for some in range(0, first, 4):  # four at a time, so that loads do not wait for sums
        for i in tl.static_range(4):
            error = tl.load(errors + (some + i) * ROWS + lane, cache_modifier=".cg")
            correction += error[None, :] * tl.load(ahead + (some + i) * WIDTH)[:, None]
    return correction


@triton.jit
def _load_scales(scale, zero, group, is_row, HAS_ZERO: tl.constexpr):
    """Load scales and zero points of a group, float32 [ROWS]; scales twice where there are no zero points."""
    factor = tl.load(scale + group, mask=is_row, other=0.0)
    middle = factor
    if HAS_ZERO:
        middle = tl.load(zero + group, mask=is_row, other=0.0)
    return factor, middle


# Headers of kernels are kept short by hand: one parameter a line would be most of them.
@triton.jit
def _rounded(
    wanted, words, stride, column, is_new, table, inverse, factor, middle, second_factor, is_row,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_STORED: tl.constexpr, WRITES_CODES: tl.constexpr,
):  # fmt: skip
    """Return a column's codes and decoded weights, int32 and float32 [ROWS]: for `wanted`, or with IS_STORED as stored.

    factor and middle: scale and zero point. inverse: pointers to the factor from weights to codes. With WRITES_CODES
    the codes of rows that are not new are those stored.
    """
    if IS_STORED or WRITES_CODES:
        kept = load_codes(words, column.to(tl.int64), is_row, BITS, stride)
    if IS_STORED:
        codes, number = kept, tl.load(table + kept, mask=is_row, other=0.0)
    else:
        x = tl.minimum(tl.maximum(wanted.to(tl.float32), -3.4028234663852886e38), 3.4028234663852886e38)
        if HAS_ZERO:
            x = x - middle * -factor
        x = x * tl.load(inverse, mask=is_row, other=0.0)
        codes, number = _code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
    if WRITES_CODES:
        codes = tl.where(is_new, codes, kept)
    if HAS_ZERO:
        number = number - middle
    number = number * factor
    if HAS_SECOND:
        number = number * second_factor
    return codes, number


@triton.jit
def _visit_tiles(
    weights, words, table, inverse, scale, zero, second, changed, order, feedback, penalty, errors, out,
    total, num_columns, num_tiles, group_size, scale_rows, rows_per_scale, rows_per_second, tiles_per_unit,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_STORED: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    WRITES_CODES: tl.constexpr, HAS_GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round tiles of ROWS rows, corrected for the errors of the columns before; write losses, or codes.

    With rows of all experts in the last dimension: weights [K, rows], packed words [K * BITS / 32, rows], changed
    [U, rows]; inverse, scale and zero float32 [G, scale_rows]. out: losses float64 [T, rows]; with WRITES_CODES codes
    [K, rows], those of `words` in units where nothing `changed`. With IS_STORED the codes are those of `words`, and
    `table` holds their values. HAS_GROUPS: a tile has columns of several groups. errors: the scratch buffer.
    """
    # Said not to be contiguous: else Triton loads adjacent rows into a thread, and moves them to another one each time.
    lane, place = tl.max_contiguous(tl.arange(0, ROWS), 1), tl.arange(0, BLOCK)
    errors += tl.program_id(0).to(tl.int64) * (WIDTH * ROWS)
    num_bands = tl.cdiv(total, ROWS)
    for visit in range(tl.program_id(0), num_bands * num_tiles, tl.num_programs(0)):
        tile, row = visit // num_bands, visit % num_bands * ROWS + lane
        is_row = row < total
        scale_row = row // rows_per_scale
        group = (tile * WIDTH // group_size).to(tl.int64) * scale_rows + scale_row
        is_new, second_factor = is_row, 1.0
        if HAS_SECOND:
            second_factor = tl.load(second + row // rows_per_second, mask=is_row, other=0.0)
        if WRITES_CODES:
            unit = (tile // tiles_per_unit).to(tl.int64) * total
            is_new = tl.load(changed + unit + row, mask=is_row, other=0) != 0
        loss = tl.zeros((ROWS,), tl.float64)
        for first in range(0, tl.minimum(num_columns - tile * WIDTH, WIDTH), BLOCK):
            start = tile * WIDTH + first
            ahead = feedback + tile.to(tl.int64) * (WIDTH * WIDTH) + first + place
            correction = _carried(errors, ahead, first, lane, WIDTH, ROWS, BLOCK)
            block_errors, block_codes = tl.zeros((BLOCK, ROWS), tl.float64), tl.zeros((BLOCK, ROWS), tl.int32)
            for j in tl.static_range(BLOCK):
                column = tile * WIDTH + tl.load(order + start + j).to(tl.int32)
                if HAS_GROUPS:
                    group = (column // group_size).to(tl.int64) * scale_rows + scale_row
                factor, middle = _load_scales(scale, zero, group, is_row, HAS_ZERO)
                weight = _load_weights(weights + column.to(tl.int64) * total, row, is_row, IS_BFLOAT16)
                wanted = weight.to(tl.float64) + _pick(correction, place, j)
                codes, number = _rounded(
                    wanted, words + row, total, column, is_new, table, inverse + group, factor, middle, second_factor,
                    is_row, BITS, KIND, LIMIT_BITS, SHIFT, DROP, HAS_ZERO, HAS_SECOND, IS_STORED, WRITES_CODES,
                )  # fmt: skip
                value = number.to(tl.float64)
                off = wanted - value
                loss += (off * off) * tl.load(penalty + start + j)
                error = weight.to(tl.float64) - value
                correction += error[None, :] * tl.load(ahead + (first + j) * WIDTH)[:, None]
                block_errors = tl.where(place[:, None] == j, error[None, :], block_errors)
                block_codes = tl.where(place[:, None] == j, codes[None, :], block_codes)
            if WRITES_CODES:
                columns = tile * WIDTH + tl.load(order + start + place).to(tl.int64)
                tl.store(out + columns[:, None] * total + row[None, :], block_codes, mask=is_row[None, :])
            if BLOCK < WIDTH:
                tl.store(errors + (first + place)[:, None] * ROWS + lane[None, :], block_errors)
                tl.debug_barrier()
        if not WRITES_CODES:
            tl.store(out + tile.to(tl.int64) * total + row, loss, mask=is_row)


def tile_losses(
    stack: torch.Tensor,
    scales: GroupScales,
    words: torch.Tensor | None,
    table: torch.Tensor | None,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Return the loss of each tile of each row of a stack [E, N, K], float64 [E, N, T].

    `words` and `table`: packed codes and `code_values`; None for compensated codes under the scales.
    factors: on the stack's device. A stack whose rows are adjacent in memory is not copied.
    """
    num_experts, num_rows, _ = stack.shape
    num_tiles = len(factors.order)
    out = torch.empty(num_tiles, num_experts * num_rows, dtype=torch.float64, device=stack.device)
    _launch(stack, scales, schema, factors, out, words=words, table=table)
    return out.t().contiguous().view(num_experts, num_rows, num_tiles)


def compensated_codes(
    stack: torch.Tensor,
    scales: GroupScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Return codes int32 [E, N, K]: compensated in units that `changed` [E, N, U], else those packed in `words`.

    stack and factors: as `tile_losses`.
    """
    num_experts, num_rows, num_columns = stack.shape
    out = torch.empty(num_columns, num_experts * num_rows, dtype=torch.uint8, device=stack.device)
    _launch(stack, scales, schema, factors, out, words=words, changed=changed.to(torch.int8))
    return out.t().contiguous().view(stack.shape).int()


def _rows_last(values: torch.Tensor) -> torch.Tensor:
    """Return [E, R, G] as [G, E * R]; not copied where it lies so in memory."""
    return values.flatten(0, 1).t().contiguous()


def _launch(
    stack: torch.Tensor,
    scales: GroupScales,
    schema: WeightSchema,
    factors: TileFactors,
    out: torch.Tensor,
    *,
    words: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    changed: torch.Tensor | None = None,
) -> None:
    num_experts, num_rows, num_columns = stack.shape
    total, (num_tiles, width) = num_experts * num_rows, factors.order.shape
    group_size, is_bfloat16 = num_columns // scales.scale.size(2), stack.dtype == torch.bfloat16
    block = min(_BLOCK, width)
    assert num_columns % block == 0, "the part of a tile at the end has whole blocks"
    num_programs = triton.cdiv(total, _ROWS) * num_tiles
    errors = out  # `out` for unused pointers
    if block < width:
        num_programs = min(num_programs, _PROGRAMS)
        errors = torch.empty(num_programs, width, _ROWS, dtype=torch.float64, device=stack.device)
    weights = _rows_last(stack)
    given = (inverse_of(scales), scales.scale, scales.zero, scales.second, changed)
    _visit_tiles[(num_programs,)](
        weights.view(torch.int16) if is_bfloat16 else weights,
        out if words is None else _rows_last(words),
        out if table is None else table,
        *(out if one is None else _rows_last(one) for one in given),
        *(factors.order, factors.feedback, factors.penalty),
        errors,
        out,
        total,
        num_columns,
        num_tiles,
        group_size,
        num_experts * scales.scale.size(1),
        num_rows // scales.scale.size(1),
        1 if scales.second is None else total // scales.second.numel(),
        1 if changed is None else num_tiles // changed.size(2),
        IS_BFLOAT16=is_bfloat16,
        **_constants(schema),
        HAS_ZERO=scales.zero is not None,
        HAS_SECOND=scales.second is not None,
        IS_STORED=table is not None,
        WRITES_CODES=changed is not None,
        HAS_GROUPS=group_size < num_columns and group_size % width > 0,
        ROWS=_ROWS,
        WIDTH=width,
        BLOCK=block,
        num_warps=_WARPS if table is None else _STORED_WARPS,
        enable_fp_fusion=False,  # or the GPU would round a product and a sum at once, and the CPU twice
    )
