"""Triton kernels: a sweep over the scales of groups, and the rounding of a group's columns for `gptq`, in registers.

The sweep has the bits of the CPU's compiled loops (`cpu_loops.encoders`): weights are decoded in float32, each
operation is rounded once, differences are squared in float64, and terms are folded in halves.
Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl

from hqconv.quantization.coded_matrix import byte_values
from hqconv.quantization.group_scales import GroupScales, stored_range
from hqconv.quantization.quantized import GroupColumns
from hqconv.quantization.scale_search import MARGIN, Ladder, magnitude_bytes
from hqconv.schemas.weight_schema import WeightSchema

LAUNCHING = threading.Lock()  # one thread builds a kernel on its first launch; others reuse it


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


@functools.cache
def code_constants(schema: WeightSchema) -> dict[str, int]:
    """Return the constants of the code type for the kernel."""
    kind, bits, exponent, mantissa = schema.code_type
    limit = torch.tensor(schema.code_type.largest).view(torch.int32).item()
    shift, drop = 128 - (1 << max(0, exponent - 1)), 23 - mantissa
    return {"BITS": bits, "KIND": int(kind), "LIMIT_BITS": int(limit), "SHIFT": shift, "DROP": drop}


@triton.jit
def _round_scale(scale, NUM_DROPPED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Round to a dtype of stored scales, see `group_scales.stored_range`; 0 where it has no such number."""
    if NUM_DROPPED > 0:
        bits = scale.to(tl.int32, bitcast=True)
        bits += (1 << (NUM_DROPPED - 1)) - 1 + ((bits >> NUM_DROPPED) & 1)
        scale = ((bits >> NUM_DROPPED) << NUM_DROPPED).to(tl.float32, bitcast=True)
    return tl.where((tl.abs(scale) >= LEAST) & (tl.abs(scale) <= MOST), scale, 0.0)


@triton.jit
def _step_scale(
    step, stored, byte, floor, values, factors, num_down, top, HAS_BYTES: tl.constexpr, NUM_DROPPED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Return the scales of a step; 0 where there is none."""
    if HAS_BYTES:
        moved = byte + step - (step > 0).to(tl.int32)
        exists = (moved >= tl.maximum(floor, 1)) & (moved <= top) & (byte <= top)
        scale = tl.load(values + moved, mask=exists, other=0.0)
        scale = tl.where(stored < 0, -scale, scale)
    else:
        scale = _round_scale(
            stored * tl.load(factors + (step + num_down)), NUM_DROPPED, LEAST, MOST
        )
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
    dropped, lowest_scale, highest_scale = stored_range(start.stored.dtype)
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


_ROWS = (
    32  # of a program of one warp: two would hold a row twice, and read what the other has written
)


@triton.jit
def _round_columns(
    pull, inverse, m, scales, zeros, seconds, numbers, values, chosen, losses, changes,
    num_rows, m_stride, pull_stride, out_stride, margin,
    BITS: tl.constexpr, KIND: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr, DROP: tl.constexpr,
    NUM_DROPPED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    LENGTH: tl.constexpr, CANDIDATES: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round some rows of one expert, as `cpu.round_columns`: under each scale, then the best one, to keep its codes."""
    expert, num_experts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    is_row = row < num_rows
    is_inside = (column < COLUMNS)[:, None] & is_row[None, :]
    place = expert * num_rows + row
    of_scale = expert * num_rows * LENGTH + row
    pull += expert * pull_stride + row
    numbers += expert * out_stride + row
    values += expert * out_stride + row
    changes += expert * num_rows * COLUMNS + row  # the target until it is rounded
    m += expert * m_stride
    inverse += expert * m_stride
    second = tl.load(seconds + place, mask=is_row, other=1.0)

    moved = tl.full((SIZE, ROWS), 0.0, tl.float32)
    for i in range(COLUMNS):
        pulled = tl.load(pull + i * num_rows, mask=is_row, other=0.0)
        by_column = tl.load(inverse + i * COLUMNS + column, mask=column < COLUMNS, other=0.0)
        moved += pulled[None, :] * by_column[:, None]
    lines = column[:, None] * num_rows
    tl.store(changes[None, :] + lines, moved, mask=is_inside)
    tl.debug_barrier()
    wanted, asked = tl.full((SIZE, ROWS), 0.0, tl.float32), tl.full((SIZE, ROWS), 0.0, tl.float32)
    for i in range(COLUMNS):
        change = tl.load(changes + i * num_rows, mask=is_row, other=0.0)
        weight = tl.load(values + i * num_rows, mask=is_row, other=0.0) + change
        tl.store(changes + i * num_rows, weight, mask=is_row)
        behind = tl.load(
            m + i * COLUMNS + column, mask=(column >= i) & (column < COLUMNS), other=0.0
        )
        wanted += weight[None, :] * behind[:, None]
        asked += change[None, :] * behind[:, None]
    tl.store(pull[None, :] + lines, wanted, mask=is_inside)
    tl.debug_barrier()
    bound = (tl.sum(asked * asked, axis=0) + 1e-37) * margin

    least, best, fitted = second * float("inf"), second * 0.0, second * 0.0
    LAST: tl.constexpr = CANDIDATES + 1 if LENGTH == 1 else 0
    for turn in range(LAST + 1):
        candidate = of_scale + tl.minimum(turn, CANDIDATES - 1) * num_experts * num_rows * LENGTH
        scale = tl.load(scales + candidate, mask=is_row, other=0.0)
        zero = tl.load(zeros + of_scale, mask=is_row, other=0.0)
        if LENGTH == 1:
            scale = tl.where(turn == CANDIDATES, fitted, tl.where(turn == LAST, best, scale))
        is_kept = (least < bound) | (LENGTH > 1)
        carried = tl.full((SIZE, ROWS), 0.0, tl.float32)
        loss, products, squares = second * 0.0, second * 0.0, second * 0.0
        for j in range(COLUMNS):
            diagonal = tl.load(m + j * COLUMNS + j)
            if LENGTH > 1:
                scale = tl.load(scales + of_scale + j * num_rows, mask=is_row, other=0.0)
                zero = tl.load(zeros + of_scale + j * num_rows, mask=is_row, other=0.0)
            weight = tl.load(changes + j * num_rows, mask=is_row, other=0.0)
            corrected = (
                weight + tl.sum(tl.where((column == j)[:, None], carried, 0.0), axis=0) / diagonal
            )
            both = scale * second
            x = (corrected + zero * scale) / tl.where(both == 0.0, float("inf"), both)
            _, number = round_to_code(x, BITS, KIND, LIMIT_BITS, SHIFT, DROP)
            value = (number - zero) * scale * second
            lost = (corrected - value) * diagonal
            loss += lost * lost
            output = tl.load(pull + j * num_rows, mask=is_row, other=0.0)
            products += output * (output - lost)
            squares += (output - lost) * (output - lost)
            if turn == LAST:
                present = tl.load(values + j * num_rows, mask=is_row, other=0.0)
                change = tl.where(is_kept, value - present, 0.0)
                tl.store(changes + j * num_rows, change, mask=is_row)
                tl.store(numbers + j * num_rows, number, mask=is_row & is_kept)
                tl.store(values + j * num_rows, value, mask=is_row & is_kept)
            behind = tl.load(
                m + j * COLUMNS + column, mask=(column > j) & (column < COLUMNS), other=0.0
            )
            carried += (weight - value)[None, :] * behind[:, None]
        is_tried = (turn < CANDIDATES) | ((turn == CANDIDATES) & (scale != 0.0))
        wins = (loss < least) & is_tried | (LENGTH > 1)
        least, best = tl.where(wins, loss, least), tl.where(wins, scale, best)
        change = products / squares
        fit = _round_scale(scale * change, NUM_DROPPED, LEAST, MOST)
        fit = tl.where((change > 0.5) & (change < 2.0), fit, 0.0)
        fitted = tl.where(wins, fit, fitted)
    tl.store(chosen + place, best, mask=is_row & (least < bound) & (LENGTH == 1))
    tl.store(losses + place, tl.load(losses + place, mask=is_row) + least, mask=is_row)


def round_columns(
    group: GroupColumns,
    schema: WeightSchema,
    scale_range: tuple[int, float, float],
    *,
    is_first: bool,
) -> torch.Tensor:
    """Round the columns of a group on a GPU, as `hqconv.quantization.cpu.round_columns`."""
    num_experts, num_columns, num_rows = group.pull.shape
    changes = torch.empty(group.pull.shape, device=group.pull.device)
    dropped, least, most = scale_range
    with LAUNCHING:
        _round_columns[(triton.cdiv(num_rows, _ROWS), num_experts)](
            *group, changes,
            num_rows, 0 if len(group.factor) == 1 else num_columns**2,
            group.pull.stride(0), group.value.stride(0), float("inf") if is_first else MARGIN,
            **code_constants(schema), NUM_DROPPED=dropped, LEAST=least, MOST=most,
            LENGTH=group.scales.size(2), CANDIDATES=len(group.scales),
            COLUMNS=num_columns, SIZE=triton.next_power_of_2(num_columns), ROWS=_ROWS,
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return changes
