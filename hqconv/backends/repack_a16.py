"""`repack` again for the common cases, packed codes of 4 and 8 bits under 16-bit activations: whole words at a time."""

from __future__ import annotations

import numpy as np

from hqconv.backends.loops import prefetch
from hqconv.compiled import compiled

_LOW_HALF = np.uint64(0xFFFFFFFF)


@compiled
def _spread_nibbles(word):
    """The eight nibbles of the low 32 bits, one to a byte."""
    word = (word | (word << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    word = (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    return (word | (word << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)


@compiled
def _spread_bytes(word):
    """The four bytes of the low 32 bits, one to 16 bits."""
    word = (word | (word << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)


@compiled
def _gather_panel(weight_ND, n0, d0, panel):
    """Turn 8 columns of 64 rows of double words; a lane's upper rows first, quarters innermost, then its lower ones."""
    for r in range(64):
        place = (r >> 3 & 1) * 32 + (r & 7) * 4 + (r >> 4)
        prefetch(weight_ND, n0 + 64 + r, d0, 1)
        row = weight_ND[n0 + r]
        for d in range(panel.shape[0]):
            panel[d, place] = row[d0 + d]


@compiled
def repack_4bit_a16(weight_ND, out):
    """`repack` for packed 4-bit codes and 16-bit activations.

    `weight_ND`: uint64 [N, K / 16], 16 codes each; `out`: uint32 [K / 16, N / 64, 32 lanes, 4 quarters]. A word takes,
    of two rows 8 apart, a byte of the left half and one of the right half: first the four low nibbles, then the high
    ones. So the words of four lanes are the nibbles of two double words, dealt like cards.
    """
    panel = np.empty((4, 64), np.uint64)
    dealt = np.empty((2, 32), np.uint64)
    for d0 in range(0, weight_ND.shape[1], 4):
        for n_block in range(weight_ND.shape[0] // 64):
            _gather_panel(weight_ND, n_block * 64, d0, panel)
            for d in range(4):
                _deal(panel[d], dealt)
                _store_tile(dealt.view(np.uint32), out[d0 + d, n_block])


@compiled
def _deal(column, dealt):
    """The nibbles of 32 upper and 32 lower double words, in the order of the tile's words."""
    for i in range(32):
        upper, lower = column[i], column[32 + i]
        left = _spread_nibbles(upper & _LOW_HALF)
        left |= _spread_nibbles(upper >> np.uint64(32)) << np.uint64(4)
        right = _spread_nibbles(lower & _LOW_HALF)
        right |= _spread_nibbles(lower >> np.uint64(32)) << np.uint64(4)
        dealt[0, i] = _spread_bytes(left & _LOW_HALF) | (_spread_bytes(right & _LOW_HALF) << np.uint64(8))
        dealt[1, i] = _spread_bytes(left >> np.uint64(32)) | (
            _spread_bytes(right >> np.uint64(32)) << np.uint64(8)
        )


@compiled
def _store_tile(words, tile):
    """Four lanes' words of each row, quarters innermost."""
    for row in range(8):
        for quarter in range(4):
            at = 8 * row + 2 * quarter
            tile[4 * row, quarter] = words[0, at]
            tile[4 * row + 1, quarter] = words[0, at + 1]
            tile[4 * row + 2, quarter] = words[1, at]
            tile[4 * row + 3, quarter] = words[1, at + 1]


@compiled
def repack_8bit_a16(weight_NH, centre, out):
    """`repack` for packed 8-bit codes and 16-bit activations; `centre` as there, around the midpoint.

    `weight_NH`: uint16 [N, K / 2], two codes each; `out`: uint32 [K / 16, N / 64, 32 lanes, 8].
    """
    ones = np.uint32(0x01010101)
    for n_block in range(weight_NH.shape[0] // 64):
        for k_block in range(weight_NH.shape[1] // 8):
            for eighth in range(8):
                for lane in range(32):
                    row = n_block * 64 + eighth * 8 + lane // 4
                    column = k_block * 8 + lane % 4
                    left = np.uint32(weight_NH[row, column])
                    right = np.uint32(weight_NH[row, column + 4])
                    word = (left & np.uint32(0xFF)) | ((right & np.uint32(0xFF)) << np.uint32(8))
                    word |= ((left >> np.uint32(8)) << np.uint32(16)) | (
                        (right >> np.uint32(8)) << np.uint32(24)
                    )
                    if centre:  # code - 128 from the midpoint up, 255 - code below it
                        below = ~(word >> np.uint32(7)) & ones
                        word ^= np.uint32(0x80808080) ^ (below * np.uint32(0x7F))
                    out[k_block, n_block, lane, eighth] = word
