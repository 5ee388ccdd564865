"""Compiled loops of the bit codec, and of content sums: codes of 1 to 8 bits, little-endian, along a row.

Shape legend: R rows, K codes of a row (a multiple of 8), B bytes of packed codes (K * bits / 8).
Every loop releases the GIL.
"""

from __future__ import annotations

import numpy as np

from hqconv.jit import compiled


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
def sum_rows(values, columns, begin, end, sums):
    """Sum values [R, W] of rows `begin` to `end`, each times its column's factor, int32 [W], to int64 sums [R]."""
    for row in range(begin, end):
        total = np.int64(0)
        for column in range(values.shape[1]):
            total += np.int64(values[row, column]) * np.int64(columns[column])
        sums[row] = total
