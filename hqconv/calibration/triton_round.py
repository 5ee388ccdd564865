"""Triton kernel of `gptq`: rounds the columns of a group one after the other, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.triton_sweep import LAUNCHING, code_constants, round_to_code
from hqconv.schemas.weight_schema import WeightSchema

_REGISTER_NUMBERS = 2048  # of a program: rows times columns


@triton.jit
def _round_columns(
    target, scales, zeros, seconds, m, losses, numbers, values, num_rows, m_stride,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_PER_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round some rows of one expert under one candidate; see `gptq._round`."""
    expert, candidate = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    is_row = row < num_rows
    is_inside = is_row[:, None] & (column < COLUMNS)[None, :]
    of_expert = expert.to(tl.int64) * num_rows + row
    of_candidate = candidate.to(tl.int64) * tl.num_programs(1) * num_rows + of_expert
    wanted = tl.load(target + of_expert[:, None] * COLUMNS + column[None, :], mask=is_inside, other=0.0)
    carried, number_of, value_of = wanted * 0.0, wanted * 0.0, wanted * 0.0
    scale = tl.full((ROWS,), 0.0, tl.float32)
    zero, second, loss = scale, scale + 1.0, scale
    if not IS_PER_COLUMN:
        scale = tl.load(scales + of_candidate, mask=is_row, other=0.0)
        if HAS_ZERO:
            zero = tl.load(zeros + of_candidate, mask=is_row, other=0.0)
    if HAS_SECOND:
        second = tl.load(seconds + of_expert, mask=is_row, other=1.0)
    m += expert * m_stride
    for j in range(COLUMNS):
        is_column = (column == j)[None, :]
        diagonal = tl.load(m + j * COLUMNS + j)
        if IS_PER_COLUMN:
            scale = tl.load(scales + of_candidate * COLUMNS + j, mask=is_row, other=0.0)
            if HAS_ZERO:
                zero = tl.load(zeros + of_candidate * COLUMNS + j, mask=is_row, other=0.0)
        weight = tl.sum(tl.where(is_column, wanted, 0.0), axis=1)
        corrected = weight + tl.sum(tl.where(is_column, carried, 0.0), axis=1) / diagonal
        both = scale * second if HAS_SECOND else scale
        x = (corrected + zero * scale if HAS_ZERO else corrected) / tl.where(both == 0.0, float("inf"), both)
        _, number = round_to_code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        value = (number - zero if HAS_ZERO else number) * scale
        if HAS_SECOND:
            value *= second
        lost = (corrected - value) * diagonal
        loss += lost * lost
        number_of, value_of = (
            tl.where(is_column, number[:, None], number_of),
            tl.where(is_column, value[:, None], value_of),
        )
        behind = tl.load(m + j * COLUMNS + column, mask=(column > j) & (column < COLUMNS), other=0.0)
        carried += (weight - value)[:, None] * behind[None, :]
    place = of_candidate[:, None] * COLUMNS + column[None, :]
    tl.store(numbers + place, number_of, mask=is_inside)
    tl.store(values + place, value_of, mask=is_inside)
    tl.store(losses + of_candidate, loss, mask=is_row)


def round_columns(
    target: torch.Tensor, scales: GroupScales, m: torch.Tensor, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses [C, E, N], numbers and values [C, E, N, S] of columns [E, N, S] under scales [C, E, N, 1 or S].

    m: upper triangular, float32 [1 or E, S, S].
    """
    num_experts, num_rows, columns = target.shape
    shape = (len(scales.scale), num_experts, num_rows)
    numbers, values = (torch.empty(*shape, columns, device=target.device) for _ in range(2))
    losses = torch.empty(shape, device=target.device)
    second = target if scales.second is None else scales.second[0].expand(num_experts, num_rows, 1).contiguous()
    zero = target if scales.zero is None else scales.zero.contiguous()
    size = triton.next_power_of_2(columns)
    rows = max(1, min(32, _REGISTER_NUMBERS // size))
    with LAUNCHING:
        _round_columns[(triton.cdiv(num_rows, rows), num_experts, len(scales.scale))](
            target.contiguous(), scales.scale.contiguous(), zero, second, m.contiguous(), losses, numbers, values,
            num_rows, 0 if len(m) == 1 else columns * columns,
            **code_constants(schema), HAS_ZERO=scales.zero is not None, HAS_SECOND=scales.second is not None,
            IS_PER_COLUMN=scales.scale.size(3) > 1, COLUMNS=columns, SIZE=size, ROWS=rows,
        )  # fmt: skip
    return losses, numbers, values
