"""Compiled CPU loops over packed codes and over groups: packing, decoding, transposition, ranges, error sums.

Codes have 1 to 8 bits and are packed little-endian along a row.
Shape legend: R or N rows, K codes of a row (a multiple of 8), G groups along K, B bytes of packed codes along K
(K * bits / 8), W int32 words.

All arithmetic is IEEE single precision in the order of Humming's `quant_weight.cuh`; error sums are double
precision in the fixed folding order of `fold_sum`, so that a GPU gives the same bits.
Every loop releases the GIL: callers run one matrix per thread. Nothing here allocates a whole matrix.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from hqconv.jit import compiled, inlined

# Rows of the source that one pass of a transposition reads: the 16 words it writes per row are a cache line.
_TILE = 128


@compiled
def pack_row(codes, num_bits, packed):
    """Pack uint8 `codes`: code k occupies bits [k * num_bits, (k + 1) * num_bits) of the row."""
    if num_bits == 8:
        for i in range(packed.size):
            packed[i] = codes[i]
    elif num_bits == 4:
        for i in range(packed.size):
            packed[i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))
    else:
        for i in range(codes.size // 8):  # 8 codes fill num_bits whole bytes
            word = np.uint64(0)
            for j in range(8):
                word |= np.uint64(codes[8 * i + j]) << np.uint64(j * num_bits)
            for j in range(num_bits):
                packed[i * num_bits + j] = np.uint8(word >> np.uint64(8 * j))


@compiled
def unpack_row(packed, num_bits, codes):
    """Unpack codes into an unsigned integer array: the inverse of `pack_row`."""
    if num_bits == 8:
        for i in range(packed.size):
            codes[i] = packed[i]
    elif num_bits == 4:
        for i in range(packed.size):
            codes[2 * i] = packed[i] & 15
            codes[2 * i + 1] = packed[i] >> 4
    else:
        mask = np.uint64((1 << num_bits) - 1)
        for i in range(codes.size // 8):
            word = np.uint64(0)
            for j in range(num_bits):
                word |= np.uint64(packed[i * num_bits + j]) << np.uint64(8 * j)
            for j in range(8):
                codes[8 * i + j] = (word >> np.uint64(j * num_bits)) & mask


@compiled
def pack_rows(codes_RK, num_bits, packed_RB):
    """Call `pack_row` for every row."""
    for row in range(packed_RB.shape[0]):
        pack_row(codes_RK[row], num_bits, packed_RB[row])


@compiled
def unpack_rows(packed_RB, num_bits, codes_RK):
    """Call `unpack_row` for every row."""
    for row in range(packed_RB.shape[0]):
        unpack_row(packed_RB[row], num_bits, codes_RK[row])


@compiled
def dequantize_groups(packed_NB, num_bits, table, zero_NG, scale_NG, scale_2_N, group_size, out_NK):
    """Compute out = ((table[code] - zero) * scale) * scale_2 in float32, each product rounded once.

    The rows of `zero_NG`, `scale_NG` and `scale_2_N` may be fewer than N where they are all the same (one row).
    The last group of a row may be short.
    """
    num_rows, num_columns = out_NK.shape
    num_groups = scale_NG.shape[1]
    codes = np.empty(num_columns, np.uint8)
    for n in range(num_rows):
        out = out_NK[n]
        unpack_row(packed_NB[n], num_bits, codes)
        for k in range(num_columns):
            out[k] = table[codes[k]]
        scale_2 = scale_2_N[min(n, scale_2_N.size - 1)]
        scales = scale_NG[min(n, scale_NG.shape[0] - 1)]
        zeros = zero_NG[min(n, zero_NG.shape[0] - 1)]
        for g in range(num_groups):
            scale = scales[g]
            zero = zeros[min(g, zeros.size - 1)]
            for k in range(g * group_size, min((g + 1) * group_size, num_columns)):
                out[k] = (out[k] - zero) * scale * scale_2


@inlined
def _swap(lines, low, high, shift, mask):
    """Exchange the high half-fields of lines[low] with the low ones of lines[high]."""
    change = ((lines[low] >> shift) ^ lines[high]) & mask
    lines[low] ^= change << shift
    lines[high] ^= change


@compiled
def _transpose_nibbles(lines):
    """Transpose the 8 x 8 matrix of nibbles in 8 uint32 lines in place: nibble j of word i goes to nibble i of j."""
    for i in range(4):
        _swap(lines, i, i + 4, np.uint32(16), np.uint32(0x0000FFFF))
    for i in (0, 1, 4, 5):
        _swap(lines, i, i + 2, np.uint32(8), np.uint32(0x00FF00FF))
    for i in (0, 2, 4, 6):
        _swap(lines, i, i + 1, np.uint32(4), np.uint32(0x0F0F0F0F))


@compiled
def transpose_4bit(words_KW, order, flip, out_NW):
    """Turn [K, N / 8] words of nibbles packed along N into [N, K / 8] words packed along K.

    Nibble j of a word is column `order[j]` of its eight; every output word is xored with `flip`.
    """
    num_columns, num_words = words_KW.shape
    block = np.empty(8, np.uint32)
    for begin in range(0, num_columns, _TILE):
        end = min(begin + _TILE, num_columns)
        for w in range(num_words):
            for k in range(begin, end, 8):
                for i in range(8):
                    block[i] = words_KW[k + i, w]
                _transpose_nibbles(block)
                for j in range(8):
                    out_NW[8 * w + order[j], k // 8] = block[j] ^ flip


SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
# Humming starts each group's range at ±1e-30, so that an all-zero group has a scale.
_TINY_BITS = np.uint32(np.float32(1e-30).view(np.uint32))


# numba's arithmetic on 32-bit integers gives 64 bits, and an index that may be negative is wrapped: both keep LLVM from
# using vectors. Hence `u32` around every operation, and unsigned indices.
u32 = np.uint32
u64 = np.uint64


@intrinsic
def bits_of(typing_context, number):
    """Return the bit pattern of a float32."""

    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), bitcast


@intrinsic
def float_of(typing_context, bits):
    """Return the float32 of a bit pattern."""

    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), bitcast


def source_bits(stored):
    """Return the float32 bit pattern of a stored number: bfloat16 bits (uint16) or float32 bits (uint32)."""
    raise AssertionError("compiled through its overload")


@overload(source_bits, inline="always")
def _source_bits_overload(stored):
    if stored == types.uint16:
        return lambda stored: u32(u32(stored) << u32(16))
    return lambda stored: stored


@compiled
def group_ranges(source_NK, group_size, highest_NG, lowest_NG):
    """Write each group's largest and smallest value, float32, of bfloat16 bits (uint16) or float32 bits (uint32)."""
    size = u64(group_size)
    for n in range(highest_NG.shape[0]):
        for g in range(highest_NG.shape[1]):
            highest_NG[n, g], lowest_NG[n, g] = group_range(source_NK[n], u64(g) * size, size)


@compiled
def group_range(row, start, length):
    """Return the largest and the smallest value of a run of a row, float32; Humming starts from ±1e-30.

    Integer comparison of the bits is exact and order-free, and it vectorises where float max does not.
    """
    largest = np.int32(_TINY_BITS)
    smallest = u32(_TINY_BITS | SIGN)
    for k in range(length):
        bits = source_bits(row[start + k])
        largest = max(largest, np.int32(bits))
        smallest = max(smallest, bits)
    return float_of(u32(largest)), float_of(smallest)


@compiled
def fold_sum(terms):
    """Sum float64 `terms` in place by folding the upper half onto the lower: one order on every device."""
    length = u64(terms.size)
    while length > u64(1):
        half = (length + u64(1)) // u64(2)
        for k in range(length - half):
            terms[k] += terms[half + k]
        length = half
    return terms[0]


@compiled
def fold_squares(weights, decoded, errors, powers):
    """Return the sums of (weight - decoded)**2 and of weight**2 in float64, in the order of `fold_sum`.

    Columns come in multiples of 32, so the first two folds are done on the way in; `errors` and `powers` are scratch
    of K / 4.
    """
    q = u64(weights.size // 4)
    for k in range(q):
        w0 = np.float64(weights[k])
        w1 = np.float64(weights[k + q])
        w2 = np.float64(weights[k + u64(2) * q])
        w3 = np.float64(weights[k + u64(3) * q])
        powers[k] = _second_fold(w0, w1, w2, w3)
        w0 = w0 - np.float64(decoded[k])
        w1 = w1 - np.float64(decoded[k + q])
        w2 = w2 - np.float64(decoded[k + u64(2) * q])
        w3 = w3 - np.float64(decoded[k + u64(3) * q])
        errors[k] = _second_fold(w0, w1, w2, w3)
    return fold_sum(errors), fold_sum(powers)


@compiled
def _second_fold(a0, a1, a2, a3):
    """Return the sum of four squares, one from each quarter of a row, added as in two folds."""
    return (a0 * a0 + a2 * a2) + (a1 * a1 + a3 * a3)


@compiled
def count_exact(weights, decoded, num_groups):
    """Return the number of groups of a row that decode exactly to the source values."""
    group_size = u64(weights.size // num_groups)
    num_exact = 0
    for g in range(num_groups):
        num_wrong = 0
        start = u64(g) * group_size
        for k in range(group_size):
            num_wrong += weights[start + k] != decoded[start + k]
        num_exact += num_wrong == 0
    return num_exact
