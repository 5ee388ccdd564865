"""Compiled CPU loops that round weights to codes, encode a matrix, and measure its error.

One is compiled for each code type, so that shifts and masks are constants: half the time of one loop for all.
Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).
"""

from __future__ import annotations

import functools

import numpy as np

from hqconv.cpu_loops.arithmetic import (
    MAGNITUDE,
    SIGN,
    bits_of,
    count_exact,
    float_of,
    fold_squares,
    prefetch,
    source_bits,
    u32,
    u64,
)
from hqconv.cpu_loops.codes import pack_row
from hqconv.jit import compiled, inlined
from hqconv.schemas.dtypes import CodeKind

_LONG_GROUP = np.uint64(
    64
)  # the next row is prefetched group by group; of shorter groups at once, which takes less
_OVERFLOW = np.float32(2.0**31)  # of 32-bit integers


@functools.cache
def rounder(code, wraps=False):
    """Return the compiled function that rounds to a `CodeType`: nearest(x, limit_bits) → (code, its number).

    x: a weight over its scale, less the lowest value if codes have a zero point. limit_bits: bits of the largest
    magnitude of a small float, or MAGNITUDE. The number is float32, before zero point and scale. wraps: numbers beyond
    32-bit integers get the least code, as in Humming's kernel, where they overflow.
    """
    if code.kind == CodeKind.FLOAT:
        return _float_rounder(code)
    least, most = (np.float32(end) for end in code.bounds)
    midpoint = np.int32(1 << (code.num_bits - 1))
    offset = midpoint if code.kind == CodeKind.SYM_INT else np.int32(0)
    has_sign = code.kind == CodeKind.SIGN_MAGNITUDE

    @compiled
    def nearest(x, limit_bits):  # half to even, and clamped
        rounded = np.float32(np.rint(np.float32(x)))
        number = min(max(rounded, least), most)
        if wraps:
            number = least if rounded >= _OVERFLOW else number
        integer = np.int32(number)
        if has_sign:
            return np.uint8(
                np.int32(abs(integer) | (midpoint if integer < 0 else np.int32(0)))
            ), number
        return np.uint8(np.int32(integer + offset)), number

    return nearest


@functools.cache
def _float_rounder(code):
    """Build the rounding to small floats: nearest, ties to the truncated number, saturated.

    Humming divides by 2**exponent_shift, which makes the target's subnormals float32 subnormals, and rounds
    their bits. Adding `threshold` rounds to the same float32 subnormal grid without the slow subnormals.
    """
    exponent_shift = 128 - (1 << (code.exponent_bits - 1))
    bias, threshold_bits = np.uint32(exponent_shift << 23), np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop, below_half = (
        np.uint32(23 - code.mantissa_bits),
        np.uint32((1 << (22 - code.mantissa_bits)) - 1),
    )
    mask, first_normal = (
        np.uint32((1 << (code.num_bits - 1)) - 1),
        np.uint32(1 << code.mantissa_bits),
    )
    sign_shift = np.uint32(32 - code.num_bits)

    @compiled
    def nearest(x, limit_bits):
        bits = bits_of(np.float32(x))
        sign, magnitude = u32(bits & SIGN), min(u32(bits & MAGNITUDE), limit_bits)
        subnormal = u32(bits_of(np.float32(float_of(magnitude) + threshold)) - threshold_bits)
        scaled = subnormal if magnitude < threshold_bits else u32(magnitude - bias)
        rounded = u32(u32(u32(scaled + below_half) >> drop) & mask)
        kept = u32(rounded << drop)
        value = np.float32(float_of(u32(kept + threshold_bits)) - threshold)
        if rounded >= first_normal:
            value = float_of(u32(kept + bias))
        return np.uint8(u32(rounded | u32(sign >> sign_shift))), float_of(
            u32(bits_of(value) | sign)
        )

    return nearest


@compiled
def limit_bits_of(limit):
    """Return the `limit_bits` of a limit, 0 for none."""
    return bits_of(limit) if limit > 0 else MAGNITUDE


@functools.cache
def encoder(code):
    """Return the compiled loop that encodes a matrix in a `CodeType`.

    encode(source_NK, limit, groups, out), with groups (inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N) and out
    (packed_NB, error_N, power_N, exact_N):
    a code is round((w - lowest) * inverse), of small floats clamped to ±`limit` where `limit` > 0; `lowest` is float64,
    and like `zero` only read for codes with a zero point. The decoded value is (code - zero) * scale * scale_2 in
    float32. `error_N` and `power_N` get each row's float64 sums of (w - decoded)**2 and w**2, and `exact_N`, unless it
    is empty, the number of groups without any error.
    """
    encode_group, group_at, num_bits = _group_encoder(code), group_reader(code), code.num_bits

    @compiled
    def encode(source_NK, limit, groups, out):
        packed_NB, error_N, power_N, exact_N = out
        num_columns, num_groups = source_NK.shape[1], groups[0].shape[1]
        weights, decoded = np.empty(num_columns, np.float32), np.empty(num_columns, np.float32)
        codes, sums = np.empty(num_columns, np.uint8), np.empty((2, num_columns // 8), np.float64)
        group_size, limit_bits = u64(num_columns // num_groups), limit_bits_of(limit)
        for n in range(source_NK.shape[0]):
            row = source_NK[n]
            if group_size < _LONG_GROUP:
                prefetch(source_NK, n + 1, 0, num_columns)
            for g in range(num_groups):
                start = u64(g) * group_size
                if group_size >= _LONG_GROUP:
                    prefetch(source_NK, n + 1, np.int64(start), np.int64(group_size))
                encode_group(
                    row,
                    start,
                    group_size,
                    limit_bits,
                    group_at(groups, n, g),
                    weights,
                    codes,
                    decoded,
                )
            pack_row(codes, num_bits, packed_NB[n])
            error_N[n], power_N[n] = fold_squares(weights, decoded, sums[0], sums[1])
            if exact_N.size > 0:
                exact_N[n] = count_exact(weights, decoded, num_groups)

    return encode


def group_reader(code):
    """Build the function (groups, n, g) → (inverse, lowest, scale, zero, scale_2) of group g in row n."""
    has_zero = code.kind == CodeKind.ASYM_INT

    @compiled
    def group_at(groups, n, g):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        if has_zero:
            return inverse_NG[n, g], lowest_NG[n, g], scale_NG[n, g], zero_NG[n, g], scale_2_N[n]
        return inverse_NG[n, g], 0.0, scale_NG[n, g], np.float32(0), scale_2_N[n]

    return group_at


def _group_encoder(code):
    """Build the loop over one group: its weights, codes and decoded weights."""
    nearest, has_zero = rounder(code, wraps=True), code.kind == CodeKind.ASYM_INT

    @inlined
    def encode_group(row, start, group_size, limit_bits, group, weights, codes, decoded):
        inverse, lowest, scale, zero, scale_2 = group
        for k in range(start, start + group_size):
            weight = float_of(source_bits(row[k]))
            weights[k] = weight
            if (
                has_zero
            ):  # in float64 and rounded once: both fl(w - lowest) and a fused multiply-add
                code, number = nearest(
                    np.float32(np.float64(weight) - lowest) * inverse, limit_bits
                )
                number = np.float32(number - zero)
            else:
                code, number = nearest(weight * inverse, limit_bits)
            codes[k] = code
            decoded[k] = number * scale * scale_2

    return encode_group


@functools.cache
def panel_encoder(code, store, panel_rows):
    """Return the compiled loop that encodes a stack of matrices as `encoder`, and gives the codes to a sink.

    encode(source_NK, limit, groups, out, first_row, num_rows, arrays): `source_NK` are rows of the stack from
    row `first_row`, a multiple of `panel_rows`; `num_rows` of them are an expert's. out: (error_N, power_N,
    exact_N). store, panel_rows, arrays: of `quantization.quantized.CodeSink`.
    """
    encode, num_bits = encoder(code), code.num_bits

    @compiled
    def encode_panels(source_NK, limit, groups, out, first_row, num_rows, arrays):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        error_N, power_N, exact_N = out
        total = source_NK.shape[0]
        panel = np.empty((panel_rows, source_NK.shape[1] * num_bits // 8), np.uint8)
        for begin in range(0, total, panel_rows):
            end = begin + panel_rows
            of_rows = (
                inverse_NG[begin:end],
                lowest_NG[begin:end] if lowest_NG.shape[0] == total else lowest_NG,
                scale_NG[begin:end],
                zero_NG[begin:end] if zero_NG.shape[0] == total else zero_NG,
                scale_2_N[begin:end],
            )
            out_of_rows = (panel, error_N[begin:end], power_N[begin:end], exact_N[begin:end])
            encode(source_NK[begin:end], limit, of_rows, out_of_rows)
            expert, row = divmod(first_row + begin, num_rows)
            store(panel, expert, row, arrays)

    return encode_panels
