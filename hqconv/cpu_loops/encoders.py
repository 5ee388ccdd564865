"""Compiled CPU loops that encode a matrix and measure its error.

One is compiled for each code type, so that shifts and masks are constants: half the time of one loop for all.
Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).
"""

from __future__ import annotations

import functools

import numpy as np

from hqconv.cpu_loops.arithmetic import (
    ASYM_INT,
    FLOAT,
    MAGNITUDE,
    SIGN,
    SYM_INT,
    bits_of,
    count_exact,
    float_of,
    fold_squares,
    group_range,
    largest_value,
    prefetch,
    source_bits,
    u32,
    u64,
)
from hqconv.cpu_loops.bit_fields import pack_row, sum_rows
from hqconv.cpu_loops.repack import TILE_COLUMNS, TILE_ROWS, lay_out_4bit, lay_out_8bit
from hqconv.jit import compiled

_LONG_GROUP = np.uint64(64)  # the next row is prefetched group by group; of shorter groups at once, which takes less
GIVEN, BFLOAT16, E8M0 = range(3)  # group scales: read, or taken from each row's own ranges and rounded so


@functools.cache
def encoder(code, scales=GIVEN):
    """Return the compiled loop that encodes a matrix in `code`: (kind, bits, exponent bits, mantissa bits).

    Where the `scales` are not GIVEN, inverse_NG and scale_NG are written: Humming's scales of symmetric codes, rounded
    as they are stored, and the inverses of the unrounded ones. That is one pass over the source instead of two.

    encode(source_NK, limit, groups, out), with groups (inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N) and out
    (packed_NB, error_N, power_N, exact_N):
    a code is round((w - lowest) * inverse), clamped first to ±`limit` where `limit` > 0; `lowest` is float64 and only
    read for asymmetric integers. The decoded value is (code - zero) * scale * scale_2 in float32. `error_N` and
    `power_N` get each row's float64 sums of (w - decoded)**2 and w**2, and `exact_N`, unless it is empty, the number of
    groups without any error.
    """
    kind, num_bits, exponent_bits, mantissa_bits = code
    largest = np.float32(largest_value(*code))
    if kind == FLOAT:
        return _float_encoder(num_bits, exponent_bits, mantissa_bits, scales, largest)
    if kind == ASYM_INT:
        return _asymmetric_encoder(num_bits)
    return _symmetric_encoder(num_bits, kind == SYM_INT, scales, largest)


@functools.cache
def tile_encoder(code, scales, centre):
    """Return the compiled loop that encodes a stack of matrices as `encoder`, and lays the codes out in kernel tiles.

    encode(source_NK, limit, groups, out, first_row, num_rows, columns, tiles): `source_NK` are rows of the stack from
    row `first_row`, a multiple of 64; `num_rows` of them are an expert's. out: (sum_N, error_N, power_N, exact_N),
    where `sum_N` gets `bit_fields.sum_rows` of the packed codes with the factors `columns`. tiles: (words, pieces) of
    `kernel_layout.weight_tiles.StackTiles`.
    """
    encode, num_bits = encoder(code, scales), code[1]
    tile_words = TILE_ROWS * TILE_COLUMNS * num_bits // 64

    @compiled
    def encode_tiles(source_NK, limit, groups, out, first_row, num_rows, columns, tiles):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        sum_N, error_N, power_N, exact_N = out
        words, pieces = tiles
        total = source_NK.shape[0]
        panel = np.empty((TILE_ROWS, source_NK.shape[1] * num_bits // 8), np.uint8)
        codes, values = panel.view(np.uint64), panel.view(np.int32)
        for begin in range(0, total, TILE_ROWS):
            end = begin + TILE_ROWS
            of_rows = (
                inverse_NG[begin:end],
                lowest_NG[begin:end] if lowest_NG.shape[0] == total else lowest_NG,
                scale_NG[begin:end],
                zero_NG[begin:end] if zero_NG.shape[0] == total else zero_NG,
                scale_2_N[begin:end],
            )
            encode(
                source_NK[begin:end],
                limit,
                of_rows,
                (panel, error_N[begin:end], power_N[begin:end], exact_N[begin:end]),
            )
            sum_rows(values, columns, 0, TILE_ROWS, sum_N[begin:end])
            expert, row = divmod(first_row + begin, num_rows)
            block = row // TILE_ROWS
            for p in range(pieces.shape[0]):
                first, last, left, right, start, of_expert, of_columns = pieces[p]
                if first <= block < last:
                    at = start + expert * of_expert + (block - first) * tile_words
                    if num_bits == 4:
                        lay_out_4bit(codes, left, right, words, at, of_columns)
                    else:
                        lay_out_8bit(codes, centre, left, right, words, at, of_columns)

    return encode_tiles


def _float_encoder(num_bits, exponent_bits, mantissa_bits, scales, largest):
    """Build the encoder of small floats: nearest, ties to the truncated value; the caller saturates by `limit`.

    Humming divides by 2**exponent_shift, which makes the target's subnormals float32 subnormals, and rounds
    their bits. Adding `threshold` rounds to the same float32 subnormal grid without the slow subnormals.
    """
    exponent_shift = 128 - (1 << (exponent_bits - 1))
    bias, threshold_bits = np.uint32(exponent_shift << 23), np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop, below_half = np.uint32(23 - mantissa_bits), np.uint32((1 << (22 - mantissa_bits)) - 1)
    mask, first_normal = np.uint32((1 << (num_bits - 1)) - 1), np.uint32(1 << mantissa_bits)
    sign_shift = np.uint32(32 - num_bits)

    @compiled
    def encode(source_NK, limit, groups, out):
        inverse_NG, _lowest_NG, scale_NG, _zero_NG, scale_2_N = groups
        weights, decoded, codes, sums = _scratch(source_NK.shape[1])
        group_size = u64(source_NK.shape[1] // inverse_NG.shape[1])
        limit_bits = bits_of(limit) if limit > 0 else MAGNITUDE
        for n in range(source_NK.shape[0]):
            row, scale_2 = source_NK[n], scale_2_N[n]
            if scales != GIVEN:
                _take_scales(row, False, scales, largest, inverse_NG[n], scale_NG[n])
            if group_size < _LONG_GROUP:
                prefetch(source_NK, n + 1, 0, source_NK.shape[1])
            for g in range(inverse_NG.shape[1]):
                inverse, scale, start = inverse_NG[n, g], scale_NG[n, g], u64(g) * group_size
                if group_size >= _LONG_GROUP:
                    prefetch(source_NK, n + 1, np.int64(start), np.int64(group_size))
                for k in range(group_size):
                    weight = float_of(source_bits(row[start + k]))
                    weights[start + k] = weight
                    bits = bits_of(np.float32(weight * inverse))
                    sign, magnitude = u32(bits & SIGN), min(u32(bits & MAGNITUDE), limit_bits)
                    subnormal = u32(bits_of(np.float32(float_of(magnitude) + threshold)) - threshold_bits)
                    scaled = subnormal if magnitude < threshold_bits else u32(magnitude - bias)
                    rounded = u32(u32(u32(scaled + below_half) >> drop) & mask)
                    codes[start + k] = np.uint8(u32(rounded | u32(sign >> sign_shift)))
                    kept = u32(rounded << drop)
                    value = np.float32(float_of(u32(kept + threshold_bits)) - threshold)
                    if rounded >= first_normal:
                        value = float_of(u32(kept + bias))
                    decoded[start + k] = float_of(u32(bits_of(value) | sign)) * scale * scale_2
            pack_row(codes, num_bits, out[0][n])
            _measure_row(n, weights, decoded, sums, inverse_NG.shape[1], out)

    return encode


def _symmetric_encoder(num_bits, is_offset, scales, largest):
    """Build the encoder of integers, half to even and clamped: offset binary, or sign and magnitude."""
    midpoint = np.int32(1 << (num_bits - 1))
    highest = np.int32(midpoint - 1)
    lowest = np.int32(-midpoint if is_offset else -highest)

    @compiled
    def encode(source_NK, limit, groups, out):
        inverse_NG, _lowest_NG, scale_NG, _zero_NG, scale_2_N = groups
        weights, decoded, codes, sums = _scratch(source_NK.shape[1])
        group_size = u64(source_NK.shape[1] // inverse_NG.shape[1])
        for n in range(source_NK.shape[0]):
            row, scale_2 = source_NK[n], scale_2_N[n]
            if scales != GIVEN:
                _take_scales(row, is_offset, scales, largest, inverse_NG[n], scale_NG[n])
            if group_size < _LONG_GROUP:
                prefetch(source_NK, n + 1, 0, source_NK.shape[1])
            for g in range(inverse_NG.shape[1]):
                inverse, scale, start = inverse_NG[n, g], scale_NG[n, g], u64(g) * group_size
                if group_size >= _LONG_GROUP:
                    prefetch(source_NK, n + 1, np.int64(start), np.int64(group_size))
                for k in range(group_size):
                    weight = float_of(source_bits(row[start + k]))
                    weights[start + k] = weight
                    code = min(max(np.int32(np.rint(np.float32(weight * inverse))), lowest), highest)
                    if is_offset:
                        codes[start + k] = np.uint8(np.int32(code + midpoint))
                    else:
                        codes[start + k] = np.uint8(np.int32(abs(code) | (midpoint if code < 0 else np.int32(0))))
                    decoded[start + k] = np.float32(code) * scale * scale_2
            pack_row(codes, num_bits, out[0][n])
            _measure_row(n, weights, decoded, sums, inverse_NG.shape[1], out)

    return encode


def _asymmetric_encoder(num_bits):
    """Build the encoder of integers with a zero point, half to even and clamped."""
    highest = np.int32((1 << num_bits) - 1)

    @compiled
    def encode(source_NK, limit, groups, out):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        weights, decoded, codes, sums = _scratch(source_NK.shape[1])
        group_size = u64(source_NK.shape[1] // inverse_NG.shape[1])
        for n in range(source_NK.shape[0]):
            row, scale_2 = source_NK[n], scale_2_N[n]
            if group_size < _LONG_GROUP:
                prefetch(source_NK, n + 1, 0, source_NK.shape[1])
            for g in range(inverse_NG.shape[1]):
                inverse, scale, start = inverse_NG[n, g], scale_NG[n, g], u64(g) * group_size
                if group_size >= _LONG_GROUP:
                    prefetch(source_NK, n + 1, np.int64(start), np.int64(group_size))
                lowest, zero = lowest_NG[n, g], zero_NG[n, g]
                for k in range(group_size):
                    weight = float_of(source_bits(row[start + k]))
                    weights[start + k] = weight
                    # In float64 and rounded once: both fl(w - lowest) and a fused multiply-add.
                    x = np.float32(np.float64(weight) - lowest) * inverse
                    code = min(max(np.int32(np.rint(x)), np.int32(0)), highest)
                    codes[start + k] = np.uint8(code)
                    decoded[start + k] = np.float32(np.float32(code) - zero) * scale * scale_2
            pack_row(codes, num_bits, out[0][n])
            _measure_row(n, weights, decoded, sums, inverse_NG.shape[1], out)

    return encode


@compiled
def _take_scales(row, is_offset, scales, largest, inverse_G, scale_G):
    """Compute the scales of one row's groups from their ranges, as `cpu_ops.group_scales`, and round them."""
    group_size = u64(row.size // inverse_G.size)
    for g in range(inverse_G.size):
        highest, lowest = group_range(row, u64(g) * group_size, group_size)
        below = np.float32(abs(lowest))
        scale = np.float32(max(highest, below) / largest)
        if is_offset:  # the codes reach one further down than up
            wide = np.float32(max(highest, below) / np.float32(largest + np.float32(1)))
            scale = max(wide, np.float32(min(highest, below) / largest))
            if highest > below:
                scale = np.float32(-scale)
        bits = bits_of(scale)
        if scales == E8M0:
            bits = u32(u32(bits + u32(0x007FFFFF)) & u32(0x7F800000))
            scale = float_of(bits)
        else:  # to the nearest bfloat16, ties to even
            bits = u32(u32(bits + u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1))) & u32(0xFFFF0000))
        inverse_G[g] = np.float32(1) / scale if scale != 0 else np.float32(np.inf)  # 0 comes of a NaN only
        scale_G[g] = float_of(bits)


@compiled
def _scratch(num_columns):
    """Allocate the buffers of one row."""
    floats, codes = np.empty((2, num_columns), np.float32), np.empty(num_columns, np.uint8)
    return floats[0], floats[1], codes, np.empty((2, num_columns // 8), np.float64)


@compiled
def _measure_row(n, weights, decoded, sums, num_groups, out):
    """Write the error sums of row `n`."""
    _, error_N, power_N, exact_N = out
    error_N[n], power_N[n] = fold_squares(weights, decoded, sums[0], sums[1])
    if exact_N.size > 0:
        exact_N[n] = count_exact(weights, decoded, num_groups)
