"""Triton kernel of error compensation: losses of candidate scales, and the codes for the chosen ones.

The bits are those of the CPU's loops (`cpu_loops.compensation`): columns one after the other, corrections in float64,
every operation rounded once. A program holds the corrections of some rows in one tile of columns.

Legend: E experts, N output rows, K input columns, T tiles along K, W columns of a tile, U units of decision along K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hqconv.quantization.gptq import inverse_of
from hqconv.quantization.quantized import TileFactors
from hqconv.quantization.scale_search import CandidateScales
from hqconv.quantization.triton_kernels import _code, _constants, _load_weights, load_codes
from hqconv.schemas.weight_schema import WeightSchema

_NUMBERS = 4096  # corrections in a program's registers: rows times columns


# Headers of kernels are kept short by hand: one parameter a line would be most of them.
@triton.jit
def _visit_tile(
    weights, words, table, inverse, lowest, scale, zero, second, changed, order, feedback, penalty, out,
    total, num_columns, num_tiles, group_size, num_groups, rows_per_scale, rows_per_second, tiles_per_unit, num_units,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_STORED: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    WRITES_CODES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round one tile of ROWS rows, corrected for the errors of the columns before; write losses, or codes.

    With IS_STORED the codes are those of `words`, and `table` holds their values. With WRITES_CODES units where nothing
    `changed` get the codes of `words`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    is_row = row < total
    scale_row, place = row // rows_per_scale * num_groups, tl.arange(0, WIDTH)
    correction = tl.zeros((ROWS, WIDTH), tl.float64)
    loss = tl.zeros((ROWS,), tl.float64)
    if WRITES_CODES:
        is_new = tl.load(changed + row * num_units + tile // tiles_per_unit, mask=is_row, other=0) != 0
    for j in range(tl.minimum(num_columns - tile * WIDTH, WIDTH)):
        at = tile * WIDTH + j
        column = tile * WIDTH + tl.load(order + at).to(tl.int32)
        group = scale_row + column // group_size
        weight = _load_weights(weights, row * num_columns + column, is_row, IS_BFLOAT16)
        carried = tl.sum(tl.where(place[None, :] == j, correction, 0.0), axis=1)
        wanted = weight.to(tl.float64) + carried
        if IS_STORED or WRITES_CODES:
            kept = load_codes(words + row * (num_columns * BITS // 32), column, is_row, BITS)
        if IS_STORED:
            number = tl.load(table + kept, mask=is_row, other=0.0)
        else:
            x = tl.minimum(tl.maximum(wanted, -3.4028234663852886e38), 3.4028234663852886e38).to(tl.float32)
            if HAS_ZERO:
                x = x - tl.load(lowest + group, mask=is_row, other=0.0)
            x = x * tl.load(inverse + group, mask=is_row, other=0.0)
            codes, number = _code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        if WRITES_CODES:
            tl.store(out + row * num_columns + column, tl.where(is_new, codes, kept), mask=is_row)
        if HAS_ZERO:
            number = number - tl.load(zero + group, mask=is_row, other=0.0)
        number = number * tl.load(scale + group, mask=is_row, other=0.0)
        if HAS_SECOND:
            number = number * tl.load(second + row // rows_per_second, mask=is_row, other=0.0)
        value = number.to(tl.float64)
        off = wanted - value
        loss += (off * off) * tl.load(penalty + at)
        ahead = tl.load(feedback + at.to(tl.int64) * WIDTH + place)
        correction += (weight.to(tl.float64) - value)[:, None] * ahead[None, :]
    if not WRITES_CODES:
        tl.store(out + row * num_tiles + tile, loss, mask=is_row)


def tile_losses(
    stack: torch.Tensor,
    scales: CandidateScales,
    words: torch.Tensor | None,
    table: torch.Tensor | None,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Return the loss of each tile of each row of a stack [E, N, K], float64 [E, N, T].

    `words` and `table`: packed codes and `triton_kernels.code_values`; None for compensated codes under the scales.
    factors: on the stack's device.
    """
    out = torch.empty(*stack.shape[:2], len(factors.order), dtype=torch.float64, device=stack.device)
    _launch(stack, scales, schema, factors, out, words=words, table=table)
    return out


def compensated_codes(
    stack: torch.Tensor,
    scales: CandidateScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Return codes int32 [E, N, K]: compensated in units that `changed` [E, N, U], else those packed in `words`."""
    out = torch.empty(stack.shape, dtype=torch.int32, device=stack.device)
    _launch(stack, scales, schema, factors, out, words=words, changed=changed.to(torch.int8))
    return out


def _launch(
    stack: torch.Tensor,
    scales: CandidateScales,
    schema: WeightSchema,
    factors: TileFactors,
    out: torch.Tensor,
    *,
    words: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    changed: torch.Tensor | None = None,
) -> None:
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups = num_experts * num_rows, scales.scale.size(2)
    num_tiles, width = factors.order.shape
    num_units = 1 if changed is None else changed.size(2)
    given = (inverse_of(scales), scales.lowest(), scales.scale, scales.zero, scales.second, changed)
    none, is_bfloat16, rows = out, stack.dtype == torch.bfloat16, _NUMBERS // width
    _visit_tile[triton.cdiv(total, rows), num_tiles](
        stack.contiguous().view(torch.int16) if is_bfloat16 else stack.contiguous(),
        none if words is None else words.contiguous(),
        none if table is None else table,
        *(none if one is None else one.contiguous() for one in given),
        *(factors.order, factors.feedback, factors.penalty),
        out,
        total,
        num_columns,
        num_tiles,
        num_columns // num_groups,
        num_groups,
        num_rows // scales.scale.size(1),
        1 if scales.second is None else total // scales.second.numel(),
        num_tiles // num_units,
        num_units,
        IS_BFLOAT16=is_bfloat16,
        **_constants(schema),
        HAS_ZERO=scales.zero is not None,
        HAS_SECOND=scales.second is not None,
        IS_STORED=table is not None,
        WRITES_CODES=changed is not None,
        ROWS=rows,
        WIDTH=width,
        enable_fp_fusion=False,  # or the GPU would round a product and a sum at once, and the CPU twice
    )
