"""Compiled loops of the decoder: kernel words to codes, zero-point centring undone, codes to float32.

Shape legend: E experts, N rows, K columns (both padded), T tiles along K, G groups along K.
Every loop releases the GIL: callers run one expert (or stack) per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.jit import compiled

Array = NDArray[Any]
_PAIR = np.uint32(0xFFFF)
_ALL = np.uint32(0xFFFFFFFF)
_NONE = np.uint32(0)
_EIGHT = np.uint32(8)


@compiled
def unpack_units(words_ETW, num_bits, activation_bits, pieces, places, units_ENU):  # type: ignore[no-untyped-def]
    """Write the codes of a fragment layout, all of a *unit* at once: U = K * activation_bits / 32.

    `words_ETW` uint32 [E, T, W]: for `4 * activation_bits` rows and `256 / activation_bits` columns, `num_bits` words
    for each of 32 lanes. `pieces`, `places` are of `codes.unit_pieces` and `unit_places`; a unit lies at row
    lane / 4 and at its lane % 4 of a half of the columns. `units_ENU` views the codes, as wide as a unit has codes.
    """
    num_experts, num_tiles, num_words = words_ETW.shape
    num_chunks = num_words // (32 * num_bits)
    width = np.uint64(num_bits)
    bits = np.uint64(activation_bits)
    for e in range(num_experts):
        for chunk in range(num_chunks):
            units = units_ENU[e, chunk * 4 * activation_bits : (chunk + 1) * 4 * activation_bits]
            for tile in range(num_tiles):
                words = words_ETW[e, tile, chunk * 32 * num_bits : (chunk + 1) * 32 * num_bits]
                for unit in range(bits):
                    first, shift, mask, left, second, shift_2, mask_2 = pieces[unit]
                    row = np.uint64(places[unit, 0] * 8)
                    column = np.uint64(tile * 8 + places[unit, 1] * 4)
                    if activation_bits == 4:
                        for lane in range(np.uint64(32)):
                            at = lane * width
                            value = np.uint32(words[at + first] >> shift) & mask
                            low = np.uint32(words[at + second] >> shift_2) & mask_2
                            wide = np.uint64(np.uint32(value << left) | low)
                            wide = (wide | (wide << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
                            wide = (wide | (wide << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
                            wide = (wide | (wide << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
                            units[row + lane // np.uint64(4), column + lane % np.uint64(4)] = wide
                        continue
                    # 16-bit activations have two codes 16 bits apart, 8-bit ones four, which need not be moved.
                    join, kept = (_EIGHT, _PAIR) if activation_bits == 16 else (_NONE, _ALL)
                    for r in range(np.uint64(8)):  # lane 4 r + c
                        for c in range(np.uint64(4)):
                            at = (np.uint64(4) * r + c) * width
                            value = np.uint32(words[at + first] >> shift) & mask
                            low = np.uint32(words[at + second] >> shift_2) & mask_2
                            value = np.uint32(np.uint32(value << left) | low)
                            units[row + r, column + c] = (value | (value >> join)) & kept


@compiled
def unpack_singly(words_ETW, num_bits, activation_bits, pieces, places, codes_ENK):  # type: ignore[no-untyped-def]
    """Do the work of `unpack_units` code by code, where those of a unit are not alike (`codes.code_pieces`)."""
    num_experts, num_tiles, num_words = words_ETW.shape
    num_chunks = num_words // (32 * num_bits)
    per_unit = 32 // activation_bits
    for e in range(num_experts):
        for chunk in range(num_chunks):
            for tile in range(num_tiles):
                words = words_ETW[e, tile, chunk * 32 * num_bits : (chunk + 1) * 32 * num_bits]
                for index in range(32):
                    first, shift, mask, left, second, shift_2, mask_2 = pieces[index]
                    row, half = places[index // per_unit]
                    row += chunk * activation_bits // 2
                    column = (tile * 8 + half * 4) * per_unit + index % per_unit
                    for lane in range(32):
                        at = np.uint64(lane * num_bits)
                        value = np.uint32(words[at + first] >> shift) & mask
                        low = np.uint32(words[at + second] >> shift_2) & mask_2
                        code = np.uint32(np.uint32(value << left) | low)
                        codes_ENK[e, row * 8 + lane // 4, column + lane % 4 * per_unit] = code


@compiled
def restore_centred(codes_ENK, zero_ENG, group_size, largest):  # type: ignore[no-untyped-def]
    """Turn sign-and-magnitude codes around a zero point back into plain codes, in place; all uint8.

    As `normalized_uint_to_fp` reads them: up to `largest - zero` a code is a distance above the zero point,
    from there on the bitwise complement of the plain code.
    """
    for e in range(codes_ENK.shape[0]):
        for n in range(codes_ENK.shape[1]):
            for g in range(zero_ENG.shape[2]):
                zero = zero_ENG[e, n, g]
                bound = np.uint8(largest - zero)
                codes = codes_ENK[e, n, g * group_size : (g + 1) * group_size]
                for k in range(codes.size):
                    code = codes[k]
                    codes[k] = np.uint8(code + zero) if code <= bound else np.uint8(largest - code)


@compiled
def decode_codes(codes_ENK, values, zero_ENG, scale_ENG, scale_2_EN, out_ENK):  # type: ignore[no-untyped-def]
    """out = (values[code] - zero) * scale * scale_2 in float32, in this order; `values` has 256 entries.

    The groups are the scale's; `zero_ENG` has as many or one.
    """
    last_zero = zero_ENG.shape[2] - 1
    group_size = np.uint64(codes_ENK.shape[2] // scale_ENG.shape[2])
    for e in range(codes_ENK.shape[0]):
        for n in range(codes_ENK.shape[1]):
            codes = codes_ENK[e, n]
            out = out_ENK[e, n]
            scale_2 = scale_2_EN[e, n]
            for g in range(scale_ENG.shape[2]):
                zero = zero_ENG[e, n, min(g, last_zero)]
                scale = scale_ENG[e, n, g]
                start = np.uint64(g) * group_size
                for k in range(group_size):
                    out[start + k] = ((values[codes[start + k]] - zero) * scale) * scale_2


@compiled
def unpack_fields(words_NW, num_bits, codes_NK):  # type: ignore[no-untyped-def]
    """Write the little-endian bit fields of each row of uint32 words: K = 32 W / num_bits codes, uint8."""
    mask = np.uint64((1 << num_bits) - 1)
    width = np.uint64(num_bits)
    for n in range(words_NW.shape[0]):
        words = words_NW[n]
        codes = codes_NK[n]
        if num_bits == 4:  # twice as fast as the general case
            for w in range(np.uint64(words.size)):
                word = words[w]
                at = np.uint64(8) * w
                for i in range(np.uint64(8)):
                    codes[at + i] = np.uint8(word & np.uint32(15))
                    word >>= np.uint32(4)
            continue
        held = np.uint64(0)
        num_held = np.uint64(0)
        k = np.uint64(0)
        for w in range(np.uint64(words.size)):
            held |= np.uint64(words[w]) << num_held
            num_held += np.uint64(32)
            while num_held >= width:
                codes[k] = np.uint8(held & mask)
                held >>= width
                num_held -= width
                k += np.uint64(1)
