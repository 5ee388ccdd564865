"""What stacks lost by their encoding, on CUDA: one pass over weights and packed codes.

The same sums as `cpu_loops.arithmetic` gives on the CPU, to the bit: weights are decoded in float32, every difference
is squared in float64, and terms are folded in halves, first along a row, then over the rows.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hqconv.humming_layout.runtime import humming
from hqconv.quantization.quantized import fold_sum

_TILE = 4096  # terms that one program folds at most
_tables: dict[tuple[str, bool, torch.device], torch.Tensor] = {}


@triton.jit
def _fold(terms, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Sums [WIDTH] over the first dimension of [SIZE, WIDTH]: its upper half onto its lower one, and so on."""
    for level in tl.static_range(NUM_LEVELS):
        terms = tl.sum(tl.reshape(terms, (2, SIZE >> (level + 1), WIDTH)), axis=0)
    return tl.reshape(terms, (WIDTH,))


@triton.jit
def _fold_rows(
    terms,
    out,
    num_columns,
    width,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_LEVELS: tl.constexpr,
):
    """Fold rows of `terms` float64 [R, num_columns] to `out` [R, width]; num_columns = SIZE * width."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, SIZE)[:, None] * width + column[None, :]
    is_inside = (column < width)[None, :] & (place < num_columns)
    values = tl.load(terms + row * num_columns + place, mask=is_inside, other=0.0)
    tl.store(out + row * width + column, _fold(values, SIZE, WIDTH, NUM_LEVELS), mask=column < width)


@triton.jit
def load_codes(words, place, is_inside, BITS: tl.constexpr):
    """Packed codes of a row at `place`, little-endian in 32-bit words; one may straddle two of them."""
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
    """One row: (w - decoded)**2 to `out` [0, row, width], w**2 to `out` [1, row, width], both folded SIZE to 1."""
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


def error_sums(
    stack: torch.Tensor, tensors: dict[str, torch.Tensor], schema: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of (w - decoded)**2 and of w**2 of each matrix, float64 [E] each.

    `stack`: [E, N, K]; `tensors`: its packed tensors of Humming's `schema`, as `QuantizedStack.tensors`. As
    `schema.dequant_tensors` and `fold_sum` give them, to the bit; waits for nothing.
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
    """`length` as SIZE times width: what a power of two folds at once, what is left, and how much a program takes."""
    size = min(length & -length, _TILE)
    width = length // size
    return size, width, min(triton.next_power_of_2(width), max(1, _TILE // size))


def folded(terms: torch.Tensor) -> torch.Tensor:
    """Float64 [..., L] folded over L: the power of two in L by a kernel, the little that is left by torch."""
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
    """The scales float32 [E, N | N / bn, G], and the second ones as they are stored, float32; None without."""
    scale, scale_2 = tensors["weight_scale"], tensors.get("weight_scale_2")
    if str(schema.weight_scale_type) == "tensor" or scale.ndim == 1:
        return None, scale.float().contiguous()
    if str(schema.bs_dtype) == "float8e5m3":
        scale = humming().ops.dequant_weight(scale.to(torch.int32).contiguous(), 5, 3, False)
    return scale.float().contiguous(), None if scale_2 is None else scale_2.float().contiguous()


def _zero_points(tensors: dict[str, torch.Tensor], schema: Any) -> torch.Tensor | None:
    """The zero points float32 [E, N, G]; None without."""
    zero = tensors.get("zero_point")
    if zero is None:
        return None
    if zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        zero = humming().ops.unpack_weight(columns, schema.b_dtype.num_bits).transpose(-1, -2)
    return zero.float().contiguous()


def code_values(schema: Any, device: torch.device) -> torch.Tensor:
    """What every code stands for before zero point and scale, float32 [2**bits]; made once for a device."""
    key = (str(schema.b_dtype), bool(schema.has_zero_point), device)
    if key not in _tables:
        _tables[key] = _make_table(schema, device)
        if device.type == "cuda":  # other streams will read it
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
