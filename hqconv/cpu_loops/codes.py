"""Compiled CPU loops over packed codes: packing, decoding to float32, and transposition.

Codes have 1 to 8 bits and are packed little-endian along a row.
Shape legend: R or N rows, K codes of a row (a multiple of 8), B bytes of packed codes along K (K * bits / 8), W int32
words.

Every loop releases the GIL: callers run one matrix per thread. Nothing here allocates a whole matrix.
"""

from __future__ import annotations

import numpy as np

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
            scale, zero = scales[g], zeros[min(g, zeros.size - 1)]
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
