"""Compiled CPU loops over packed codes: packing, decoding to float32, transposition, and scans.

Codes have 1 to 8 bits and are packed little-endian along a row.
Shape legend: R or N rows, K codes of a row (a multiple of 8), B bytes of packed codes along K (K * bits / 8), W int32
words.

Every loop releases the GIL: callers run one matrix per thread. Nothing here allocates a whole matrix.
"""

from __future__ import annotations

import numpy as np

from hqconv.cpu_loops.arithmetic import fold_squares
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
def has_code(words, mask):
    """Return True if `byte & mask == mask` for any byte of uint32 words; the mask's highest bit is 0x40.

    Adding 0x80 - mask carries into the top bit of just those bytes, and never out of one.
    """
    every = np.uint32(0x01010101)
    masks, bump = np.uint32(mask) * every, np.uint32(0x80 - mask) * every
    found = np.uint32(0)
    for i in range(words.size):
        found |= (words[i] & masks) + bump
    return (found & np.uint32(0x80808080)) != 0


@compiled
def _look_up_4bit(packed_B, table, values):
    """Set values[2i], values[2i + 1] to the table's entries for the low and high nibble of byte i."""
    for i in range(packed_B.size):
        values[2 * i] = table[packed_B[i] & 15]
        values[2 * i + 1] = table[packed_B[i] >> 4]


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
        if num_bits == 4:
            _look_up_4bit(packed_NB[n], table, out)
        else:
            unpack_row(packed_NB[n], num_bits, codes)
            for k in range(num_columns):
                out[k] = table[codes[k]]
        scale_2 = scale_2_N[min(n, scale_2_N.size - 1)]
        scales = scale_NG[min(n, scale_NG.shape[0] - 1)]
        zeros = zero_NG[min(n, zero_NG.shape[0] - 1)]
        for g in range(num_groups):
            scale, zero = scales[g], zeros[min(g, zeros.size - 1)]
            for k in range(g * group_size, min((g + 1) * group_size, num_columns)):
                out[k] = (out[k] - zero) * scale * scale_2


@compiled
def dequantize_columns(packed_NB, num_bits, table, zero_NG, scale_NG, scale_2_N, group_K, out_NK):
    """Decode as `dequantize_groups`, with column k in group `group_K[k]`."""
    num_rows, num_columns = out_NK.shape
    codes = np.empty(num_columns, np.uint8)
    for n in range(num_rows):
        out = out_NK[n]
        unpack_row(packed_NB[n], num_bits, codes)
        scale_2 = scale_2_N[min(n, scale_2_N.size - 1)]
        scales = scale_NG[min(n, scale_NG.shape[0] - 1)]
        zeros = zero_NG[min(n, zero_NG.shape[0] - 1)]
        for k in range(num_columns):
            g = group_K[k]
            out[k] = (table[codes[k]] - zeros[min(g, zeros.size - 1)]) * scales[g] * scale_2


@compiled
def rounding_sums(packed_NB, num_bits, table, zero_NG, scale_NG, kept_NG, group_size, sums_2N):
    """Sum each row's (w - d)**2 and w**2, as `fold_squares`: w is decoded with `scale_NG`, d with `kept_NG`.

    The rows of `zero_NG`, `scale_NG` and `kept_NG` may be fewer than N where they are all the same (one row).
    """
    num_rows, num_columns = packed_NB.shape[0], packed_NB.shape[1] * 8 // num_bits
    codes = np.empty(num_columns, np.uint8)
    weights, decoded = np.empty((2, num_columns), np.float32)
    scratch = np.empty((2, num_columns // 8))
    for n in range(num_rows):
        unpack_row(packed_NB[n], num_bits, codes)
        scales, kept = (
            scale_NG[min(n, scale_NG.shape[0] - 1)],
            kept_NG[min(n, kept_NG.shape[0] - 1)],
        )
        zeros = zero_NG[min(n, zero_NG.shape[0] - 1)]
        for g in range(scales.size):
            scale, rounded, zero = scales[g], kept[g], zeros[min(g, zeros.size - 1)]
            for k in range(g * group_size, min((g + 1) * group_size, num_columns)):
                value = table[codes[k]] - zero
                weights[k] = value * scale
                decoded[k] = value * rounded
        sums_2N[0, n], sums_2N[1, n] = fold_squares(weights, decoded, scratch[0], scratch[1])


@inlined
def _swap(words, low, high, shift, mask):
    """Exchange the high half-fields of words[low] with the low ones of words[high]."""
    change = ((words[low] >> shift) ^ words[high]) & mask
    words[low] ^= change << shift
    words[high] ^= change


@compiled
def _transpose_nibbles(words):
    """Transpose the 8 x 8 matrix of nibbles in 8 uint32 words in place: nibble j of word i goes to nibble i of j."""
    for i in range(4):
        _swap(words, i, i + 4, np.uint32(16), np.uint32(0x0000FFFF))
    for i in (0, 1, 4, 5):
        _swap(words, i, i + 2, np.uint32(8), np.uint32(0x00FF00FF))
    for i in (0, 2, 4, 6):
        _swap(words, i, i + 1, np.uint32(4), np.uint32(0x0F0F0F0F))


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


@compiled
def ternary_rows(packed_RK, out_NB):
    """Unpack BitNet's bytes [N / 4, K] into sign-magnitude codes packed along K; False if a code is 3.

    Bits 2i and 2i + 1 of row r hold row r + i * N / 4, as 0, 1, 2 for -1, 0, 1.
    """
    num_rows, num_columns = packed_RK.shape
    codes = np.empty(num_columns, np.uint8)
    highest = np.uint8(0)
    for r in range(num_rows):
        for i in range(4):
            for k in range(num_columns):
                code = (packed_RK[r, k] >> np.uint8(2 * i)) & np.uint8(3)
                highest = max(highest, code)
                # 0, 1, 2 become 3 (minus one), 0, 1
                codes[k] = (code >> np.uint8(1)) | (np.uint8(3) if code == 0 else np.uint8(0))
            out = out_NB[r + i * num_rows]
            for b in range(out.size):
                first = 4 * b
                out[b] = (
                    codes[first]
                    | (codes[first + 1] << np.uint8(2))
                    | (codes[first + 2] << np.uint8(4))
                    | (codes[first + 3] << np.uint8(6))
                )
    return highest < 3
