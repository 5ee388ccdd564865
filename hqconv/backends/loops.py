"""Compiled CPU loops: group ranges, encoding, error sums. No torch, no allocation of a whole matrix.

Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).

All arithmetic is IEEE single precision in the order of Humming's `quant_weight.cuh`; error sums are double
precision in the fixed folding order of `fold_sum`, so that a GPU gives the same bits.
Every loop releases the GIL: callers run one matrix per thread.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from hqconv.backends.codec_loops import pack_row
from hqconv.compiled import compiled

FLOAT, SYM_INT, ASYM_INT, SIGN_MAGNITUDE = range(4)

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NON_FINITE = np.uint32(0x7F800000)
# Humming starts each group's range at ±1e-30, so that an all-zero group has a scale.
_TINY_BITS = np.uint32(np.float32(1e-30).view(np.uint32))


def _load_row(source_row, bits_row):
    """Fill `bits_row` (uint32) with the float32 bit patterns of one source row."""
    raise AssertionError("compiled through its overload")


@overload(_load_row, inline="always")
def _load_row_overload(source_row, bits_row):
    if source_row.dtype == types.uint16:  # bfloat16 bits

        def load_bfloat16(source_row, bits_row):
            for k in range(source_row.size):
                bits_row[k] = np.uint32(source_row[k]) << np.uint32(16)

        return load_bfloat16

    def load_float32(source_row, bits_row):
        for k in range(source_row.size):
            bits_row[k] = source_row[k]

    return load_float32


@compiled
def group_ranges(source_NK, group_size, highest_NG, lowest_NG):
    """Write each group's largest and smallest value; return False if any value is NaN or infinite.

    `source_NK` holds bfloat16 bits (uint16) or float32 bits (uint32); outputs are float32 bits (uint32).
    Integer comparison of the bits is exact and order-free, and it vectorises where float max does not.
    """
    num_rows, num_columns = source_NK.shape
    num_groups = num_columns // group_size
    row = np.empty(num_columns, np.uint32)
    row_Gk = row.reshape(num_groups, group_size)
    finite = True
    for n in range(num_rows):
        _load_row(source_NK[n], row)
        for g in range(num_groups):
            highest = np.int32(_TINY_BITS)
            lowest = _TINY_BITS | _SIGN
            for k in range(group_size):
                highest = max(highest, np.int32(row_Gk[g, k]))
                lowest = max(lowest, row_Gk[g, k])
            highest_NG[n, g] = np.uint32(highest)
            lowest_NG[n, g] = lowest
            if np.uint32(highest) >= _NON_FINITE or (lowest & _MAGNITUDE) >= _NON_FINITE:
                finite = False
    return finite


@compiled
def _encode_float(x, bits, codes, values, exponent_shift, mantissa_bits, sign_shift):
    """Round `x` to a small float: nearest, ties to the truncated value; saturation is the caller's.

    Humming divides by 2**exponent_shift, which makes the target's subnormals float32 subnormals, and rounds
    their bits. Adding `threshold` rounds to the same float32 subnormal grid without the slow subnormals.
    """
    bias = np.uint32(exponent_shift) << np.uint32(23)
    threshold_bits = np.uint32(exponent_shift + 1) << np.uint32(23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    subnormal_unit = np.float32(2.0 ** (exponent_shift - 149))
    drop = np.uint32(23 - mantissa_bits)
    below_half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    mask = ((np.uint32(1) << np.uint32(sign_shift)) - np.uint32(1)) << drop
    one = np.uint32(1) << np.uint32(23)
    shifted = np.empty(x.size, np.float32)
    shifted_bits = shifted.view(np.uint32)
    value_bits = values.view(np.uint32)
    for k in range(x.size):
        shifted[k] = np.abs(x[k]) + threshold
    for k in range(x.size):
        magnitude = bits[k] & _MAGNITUDE
        small = magnitude < threshold_bits
        scaled = (shifted_bits[k] - threshold_bits) if small else (magnitude - bias)
        rounded = ((scaled + below_half) >> drop << drop) & mask
        codes[k] = (rounded >> drop) | ((bits[k] >> np.uint32(31)) << np.uint32(sign_shift))
        shifted_bits[k] = rounded
    for k in range(x.size):
        rounded = shifted_bits[k]
        subnormal = np.float32(np.int32(rounded)) * subnormal_unit
        values[k] = subnormal
        if rounded >= one:
            value_bits[k] = rounded + bias
        value_bits[k] |= bits[k] & _SIGN


@compiled
def _encode_integer(x, codes, values, kind, num_bits):
    """Round `x` half to even and clamp; symmetric codes are offset binary, `values` are the codes' meaning."""
    midpoint = np.int32(1 << (num_bits - 1))
    if kind == ASYM_INT:
        top = np.int32((1 << num_bits) - 1)
        for k in range(x.size):
            code = np.int32(np.rint(x[k]))
            code = min(max(code, np.int32(0)), top)
            codes[k] = code
            values[k] = np.float32(code)
    elif kind == SYM_INT:
        for k in range(x.size):
            code = np.int32(np.rint(x[k]))
            code = min(max(code, -midpoint), midpoint - np.int32(1))
            codes[k] = code + midpoint
            values[k] = np.float32(code)
    else:
        limit = midpoint - np.int32(1)
        for k in range(x.size):
            code = np.int32(np.rint(x[k]))
            code = min(max(code, -limit), limit)
            codes[k] = abs(code) | (midpoint if code < 0 else np.int32(0))
            values[k] = np.float32(code)


@compiled
def fold_sum(terms):
    """Sum float64 `terms` in place by folding the upper half onto the lower: one order on every device."""
    length = terms.size
    while length > 1:
        half = (length + 1) // 2
        for k in range(length - half):
            terms[k] += terms[half + k]
        length = half
    return terms[0]


@compiled
def _scale_row(row, kind, inverse_G, lowest_G, limit, x):
    """x = (row - lowest) * inverse per group, clamped to ±limit where limit > 0."""
    num_groups = inverse_G.size
    row_Gk, x_Gk = row.reshape(num_groups, -1), x.reshape(num_groups, -1)
    for g in range(num_groups):
        lowest, inverse = lowest_G[g], inverse_G[g]
        if kind == ASYM_INT:  # in float64 and rounded once: both fl(w - lowest) and a fused multiply-add
            for k in range(row_Gk.shape[1]):
                x_Gk[g, k] = np.float32(np.float64(row_Gk[g, k]) - lowest) * inverse
        else:
            for k in range(row_Gk.shape[1]):
                x_Gk[g, k] = row_Gk[g, k] * inverse
    if limit > 0:
        for k in range(row.size):
            x[k] = min(max(x[k], -limit), limit)


@compiled
def _decode_row(values, zero_G, scale_G, scale_2):
    """Turn code values into weights in place: (value - zero) * scale * scale_2 in float32."""
    values_Gk = values.reshape(scale_G.size, -1)
    for g in range(scale_G.size):
        zero, scale = zero_G[g], scale_G[g]
        for k in range(values_Gk.shape[1]):
            values_Gk[g, k] = (values_Gk[g, k] - zero) * scale * scale_2


@compiled
def _fold_squares(row, decoded, terms):
    """Sums of (row - decoded)**2 and of row**2 in float64, in the order of `fold_sum`.

    Columns come in multiples of 32, so the first three folds are done on the way in; `terms` is scratch of K / 8.
    """
    eighth = row.size // 8
    for k in range(eighth):
        total = 0.0
        for i in range(2):  # the pairs of the third fold
            inner = 0.0
            for j in range(2):  # the pairs of the second
                at = k + (i + 2 * j) * eighth
                low = np.float64(row[at]) - np.float64(decoded[at])
                high = np.float64(row[at + 4 * eighth]) - np.float64(decoded[at + 4 * eighth])
                inner += low * low + high * high
            total += inner
        terms[k] = total
    error = fold_sum(terms)
    for k in range(eighth):
        total = 0.0
        for i in range(2):
            inner = 0.0
            for j in range(2):
                at = k + (i + 2 * j) * eighth
                low, high = np.float64(row[at]), np.float64(row[at + 4 * eighth])
                inner += low * low + high * high
            total += inner
        terms[k] = total
    return error, fold_sum(terms)


@compiled
def _count_exact(row, decoded, num_groups):
    """How many groups of a row decode to the very source values."""
    row_Gk, decoded_Gk = row.reshape(num_groups, -1), decoded.reshape(num_groups, -1)
    num_exact = 0
    for g in range(num_groups):
        num_wrong = 0
        for k in range(row_Gk.shape[1]):
            num_wrong += row_Gk[g, k] != decoded_Gk[g, k]
        num_exact += num_wrong == 0
    return num_exact


@compiled
def encode_matrix(
    source_NK,
    code,
    limit,
    inverse_NG,
    lowest_NG,
    scale_NG,
    zero_NG,
    scale_2_N,
    packed_NB,
    error_N,
    power_N,
    exact_N,
):
    """Encode one matrix with given group parameters and measure what the stored codes decode to.

    `code` is (kind, bits, exponent bits, mantissa bits). A code is round((w - lowest) * inverse), clamped first
    to ±`limit` where `limit` > 0; `lowest` is float64 and only read for asymmetric integers. The decoded value
    is (code - zero) * scale * scale_2 in float32. `error_N` and `power_N` get each row's float64 sums of
    (w - decoded)**2 and w**2, and `exact_N`, unless it is empty, the number of groups without any error.
    """
    kind, num_bits, exponent_bits, mantissa_bits = code
    num_rows, num_columns = source_NK.shape
    row_bits = np.empty(num_columns, np.uint32)
    row = row_bits.view(np.float32)
    x = np.empty(num_columns, np.float32)
    x_bits = x.view(np.uint32)
    values = np.empty(num_columns, np.float32)
    codes = np.empty(num_columns, np.uint8)
    terms = np.empty(num_columns // 8, np.float64)
    exponent_shift = 128 - (1 << (exponent_bits - 1)) if exponent_bits > 0 else 0
    for n in range(num_rows):
        _load_row(source_NK[n], row_bits)
        _scale_row(row, kind, inverse_NG[n], lowest_NG[n], limit, x)
        if kind == FLOAT:
            _encode_float(x, x_bits, codes, values, exponent_shift, mantissa_bits, num_bits - 1)
        else:
            _encode_integer(x, codes, values, kind, num_bits)
        pack_row(codes, num_bits, packed_NB[n])
        _decode_row(values, zero_NG[n], scale_NG[n], scale_2_N[n])
        error_N[n], power_N[n] = _fold_squares(row, values, terms)
        if exact_N.size > 0:
            exact_N[n] = _count_exact(row, values, inverse_NG.shape[1])
