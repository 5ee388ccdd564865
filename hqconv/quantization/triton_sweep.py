"""Triton kernels: a sweep over the scales of groups, and the rounding of a group's columns for `gptq`, in registers.

The bits are those of the CPU's compiled loops (`cpu_loops.encoders`): weights are decoded in float32, each operation
is rounded once, differences are squared in float64, and terms are folded in halves.
Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl

from hqconv.quantization.coded_matrix import byte_values
from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.scale_search import Ladder, magnitude_bytes
from hqconv.schemas.weight_schema import WeightSchema

LAUNCHING = (
    threading.Lock()
)  # one thread builds a kernel on its first launch; the others wait and reuse it


# Headers of kernels are kept short by hand: one parameter a line would be most of them.
@triton.jit
def _round_float(x, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):
    """Round to the nearest small float, ties to the truncated one, saturated; return unsigned code and signed value."""
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
def round_to_code(x, BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr):  # fmt: skip # noqa: E501
    """Round scaled weights to codes; return codes and their values. KIND: a `CodeKind`."""
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
def _fold_groups(terms, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Sum [WIDTH, SIZE] over the second dimension to [WIDTH]: its upper half onto its lower one, and so on."""
    for level in tl.static_range(NUM_LEVELS):
        terms = tl.sum(tl.reshape(terms, (WIDTH, 2, SIZE >> (level + 1))), axis=1)
    return tl.reshape(terms, (WIDTH,))


def code_constants(schema: WeightSchema) -> dict[str, int]:
    """Return the constants of the code type for the kernel."""
    kind, bits, exponent, mantissa = schema.code_type
    limit = torch.tensor(schema.code_type.largest).view(torch.int32).item()
    shift, drop = 128 - (1 << max(0, exponent - 1)), 23 - mantissa
    return {"BITS": bits, "KIND": int(kind), "LIMIT_BITS": int(limit), "SHIFT": shift, "DROP": drop}


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
def _group_terms(weight, number, scale, second, is_inside, HAS_SECOND: tl.constexpr):
    """Return the squared errors of decoded numbers, float64 [WIDTH, SIZE]."""
    number = number * scale[:, None]
    if HAS_SECOND:
        number *= second
    terms = weight.to(tl.float64) - number.to(tl.float64)
    return tl.where(is_inside, terms * terms, 0.0)


@triton.jit
def _sweep(
    weights, stored_scales, bytes_of, floors, values, factors, second, error, steps,
    num_columns, num_groups, rows_per_expert, rows_per_second,
    limit, num_up, num_down, top, no_half,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FIRST: tl.constexpr, HAS_BYTES: tl.constexpr, HAS_FLOOR: tl.constexpr,
    NUM_DROPPED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, HAS_SECOND: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr,
):  # fmt: skip
    """Sweep the scales of groups in a row, as `cpu_loops.encoders.Searcher`; update `error` and write `steps`."""
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
    second_scale = 1.0
    if HAS_SECOND:
        second_scale = tl.load(second + row // rows_per_second)
    end = tl.maximum(tl.max(tl.abs(weight), axis=1), 1e-30) * limit
    best = part * 0
    is_known = is_part & (tl.abs(stored) < float("inf"))

    step, active = tl.program_id(0) * 0 + FIRST, is_known
    going = tl.max(active.to(tl.int32), axis=0)
    while (going > 0) & (step <= num_up):
        scale = _step_scale(
            step,
            stored,
            byte,
            floor,
            values,
            factors,
            num_down,
            top,
            HAS_BYTES,
            NUM_DROPPED,
            LEAST,
            MOST,
        )
        both = scale * second_scale if HAS_SECOND else scale
        is_tried = (tl.abs(both) < end) | (step <= 1)
        if HAS_BYTES:
            is_tried = is_tried | (byte + step - 1 < no_half)
        active = active & is_tried
        exists = active & (scale != 0.0)
        inverse = tl.div_rn(both * 0.0 + 1.0, tl.where(exists, both, 1.0))
        _, number = round_to_code(weight * inverse[:, None], BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        terms = _group_terms(weight, number, scale, second_scale, is_inside, HAS_SECOND)
        loss = _fold_groups(terms, SIZE, WIDTH, NUM_LEVELS)
        wins = exists & (loss < least)
        best, least = tl.where(wins, step, best), tl.where(wins, loss, least)
        step += 1
        going = tl.max(active.to(tl.int32), axis=0)

    step, active = tl.program_id(0) * 0 - 1, is_known
    going = tl.max(active.to(tl.int32), axis=0)
    while (going > 0) & (step >= -num_down):
        scale = _step_scale(
            step,
            stored,
            byte,
            floor,
            values,
            factors,
            num_down,
            top,
            HAS_BYTES,
            NUM_DROPPED,
            LEAST,
            MOST,
        )
        both = scale * second_scale if HAS_SECOND else scale
        active = active & (scale != 0.0)
        inverse = tl.div_rn(both * 0.0 + 1.0, tl.where(active, both, 1.0))
        x = weight * inverse[:, None]
        _, number = round_to_code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
        terms = _group_terms(weight, number, scale, second_scale, is_inside, HAS_SECOND)
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
    start: GroupScales,
    least: torch.Tensor,
    ladder: Ladder,
    floor: torch.Tensor | None,
    schema: WeightSchema,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the steps of the best group scales and their errors, as `scale_search.ScaleMeter.sweep`; see `can_sweep`.

    Steps that cannot win are left out.
    """
    num_experts, num_rows, num_columns = stack.shape
    total, num_groups, size = (
        num_experts * num_rows,
        start.scale.size(2),
        schema.weight_scale_group_size,
    )
    is_bfloat16, device = stack.dtype == torch.bfloat16, stack.device
    error, steps = (
        least.clone().contiguous(),
        torch.empty(least.shape, dtype=torch.int32, device=device),
    )
    tile = min(triton.next_power_of_2(num_groups), max(1, _SWEPT // size))
    lowest, highest = schema.code_type.bounds
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
        error,
        steps,
        num_columns,
        num_groups,
        num_rows,
        1 if start.second is None else total // start.second.numel(),
        ladder.limit,
        ladder.num_up,
        ladder.num_down,
        ladder.top,
        ladder.no_half,
        **code_constants(schema),
        LOWEST=lowest,
        HIGHEST=highest,
        FIRST=ladder.first,
        HAS_BYTES=ladder.has_bytes,
        HAS_FLOOR=floor is not None,
        NUM_DROPPED=dropped,
        LEAST=lowest_scale,
        MOST=highest_scale,
        HAS_SECOND=start.second is not None,
        IS_BFLOAT16=is_bfloat16,
        SIZE=size,
        WIDTH=tile,
        NUM_LEVELS=size.bit_length() - 1,
        enable_fp_fusion=False,
    )
    return steps, error


@triton.jit
def _copy(source, out):
    tl.store(out, tl.load(source))


def build_a_kernel(device: torch.device) -> None:
    """Build and run a small kernel: Triton's launchers need a C compiler."""
    source = torch.ones(1, device=device)
    _copy[1,](source, torch.empty_like(source))


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
