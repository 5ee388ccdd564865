"""Triton kernel of `gptq`: rounds the columns of a group one after the other, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.triton_sweep import LAUNCHING, code_constants, round_to_code
from hqconv.schemas.weight_schema import WeightSchema

_MOST_ROWS, _MOST_NUMBERS = (
    128,
    1 << 14,
)  # of a program; with 4 warps each thread has one row's columns then


@triton.jit
def _round_columns(
    target, scales, zeros, seconds, m, losses, indices, numbers, values, num_rows, m_stride,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_SECOND: tl.constexpr, IS_PER_COLUMN: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round some rows of one expert under each candidate, then once more under the best one; see `gptq._round`.

    Rows are next to each other in memory: [E, S, N].
    """
    expert, num_experts = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    is_row = row < num_rows
    of_expert = expert.to(tl.int64) * num_rows + row
    first = expert.to(tl.int64) * num_rows * COLUMNS + row
    second = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_SECOND:
        second = tl.load(seconds + of_expert, mask=is_row, other=1.0)
    m += expert * m_stride
    best, least = tl.full((ROWS,), 0, tl.int64), tl.full((ROWS,), float("inf"), tl.float32)
    for turn in range(CANDIDATES if CANDIDATES == 1 else CANDIDATES + 1):
        is_last = turn >= CANDIDATES - (1 if CANDIDATES == 1 else 0)
        of_candidate = tl.where(is_last, best, turn) * num_experts * num_rows + of_expert
        scale, zero = second * 0.0, second * 0.0
        if not IS_PER_COLUMN:
            scale = tl.load(scales + of_candidate, mask=is_row, other=0.0)
            if HAS_ZERO:
                zero = tl.load(zeros + of_candidate, mask=is_row, other=0.0)
        carried = tl.full((SIZE, ROWS), 0.0, tl.float32)
        loss = second * 0.0
        for j in range(COLUMNS):
            diagonal, place = tl.load(m + j * COLUMNS + j), first + j * num_rows
            if IS_PER_COLUMN:
                scale = tl.load(scales + place, mask=is_row, other=0.0)
                if HAS_ZERO:
                    zero = tl.load(zeros + place, mask=is_row, other=0.0)
            weight = tl.load(target + place, mask=is_row, other=0.0)
            corrected = (
                weight + tl.sum(tl.where((column == j)[:, None], carried, 0.0), axis=0) / diagonal
            )
            both = scale * second if HAS_SECOND else scale
            x = (corrected + zero * scale if HAS_ZERO else corrected) / tl.where(
                both == 0.0, float("inf"), both
            )
            _, number = round_to_code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
            value = (number - zero if HAS_ZERO else number) * scale
            if HAS_SECOND:
                value *= second
            lost = (corrected - value) * diagonal
            loss += lost * lost
            tl.store(numbers + place, number, mask=is_row & is_last)
            tl.store(values + place, value, mask=is_row & is_last)
            behind = tl.load(
                m + j * COLUMNS + column, mask=(column > j) & (column < COLUMNS), other=0.0
            )
            carried += (weight - value)[None, :] * behind[:, None]
        wins = (loss < least) & (turn < CANDIDATES)
        best, least = tl.where(wins, turn, best), tl.where(wins, loss, least)
    tl.store(losses + of_expert, least, mask=is_row)
    tl.store(indices + of_expert, best, mask=is_row)


def round_columns(
    target: torch.Tensor, scales: GroupScales, m: torch.Tensor, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses, indices int64 [E, N], numbers and values [E, N, S] of columns [E, N, S] under the best scales.

    scales: of C candidates, [C, E, N, 1], or [1, E, N, S]. m: upper triangular, float32 [1 or E, S, S].
    """
    num_experts, num_rows, columns = target.shape
    target = target.mT.contiguous()
    numbers, values = torch.empty_like(target), torch.empty_like(target)
    losses = torch.empty(num_experts, num_rows, device=target.device)
    indices = torch.empty(num_experts, num_rows, dtype=torch.int64, device=target.device)
    second = (
        target
        if scales.second is None
        else scales.second.expand(num_experts, num_rows, 1).contiguous()
    )
    zero = target if scales.zero is None else scales.zero.mT.contiguous()
    size = triton.next_power_of_2(columns)
    rows = max(1, min(_MOST_ROWS, _MOST_NUMBERS // size))
    with LAUNCHING:
        _round_columns[(triton.cdiv(num_rows, rows), num_experts)](
            target, scales.scale.mT.contiguous(), zero, second, m.contiguous(), losses, indices, numbers, values,
            num_rows, 0 if len(m) == 1 else columns * columns,
            **code_constants(schema), HAS_ZERO=scales.zero is not None, HAS_SECOND=scales.second is not None,
            IS_PER_COLUMN=scales.scale.size(3) > 1, CANDIDATES=len(scales.scale), COLUMNS=columns, SIZE=size, ROWS=rows,
        )  # fmt: skip
    return losses, indices, numbers.mT, values.mT
